/* What fit does between steps: means of epochs, validation, early stopping, best weights, checkpoints, continuing; the
   same on several ranks. Metrics against sums in double precision. */
#include "../hpml_comm.h"
#include "test.h"
#include "toy_points.h"
#include "files.h"
#include <unistd.h>

/* A small classifier of `points`, which learns 48 of them by heart, so that the validation loss has a minimum. */
typedef struct learner {
    hpml_ctx     *ctx;
    hpml_trainer *t;
    hpml_dataset *data, *validation;
} learner;

static void learner_fill(learner *l, hpml_ctx *ctx, int64_t batch)
{
    hpml_linear_desc relu = { .activation = HPML_ACT_RELU };
    hpml_tensor     *x    = hpml_input_2d(ctx, batch, INPUTS);
    hpml_tensor     *h    = hpml_linear(hpml_linear(x, 64, &relu), 64, &relu);
    l->ctx = ctx;
    l->t   = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = x, .output = hpml_linear(h, CLASSES, NULL),
                                                            .lr = 0.01f, .optimizer = HPML_OPT_ADAM });
    hpml_dataset *all = points(ctx, 148, 0, 0, 0);
    l->data       = hpml_dataset_slice(all, 0, 48);
    l->validation = hpml_dataset_slice(all, 48, 100);
}

static learner learner_create(void)
{
    learner l = { 0 };
    learner_fill(&l, hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1, .seed = 3 }), 8);
    return l;
}

/* Adds up what the callbacks get. */
typedef struct seen {
    double     loss, accuracy;
    int64_t    samples;
    int        steps, epochs, stop_at;
    hpml_epoch last;
    volatile int stop;
} seen;

static int count_step(const hpml_step_info *i, void *user)
{
    seen *s = (seen *)user;
    s->loss += (double)i->loss * (double)i->samples;
    s->accuracy += (double)i->accuracy * (double)i->samples;
    s->samples += i->samples;
    s->steps++;
    if (s->steps == s->stop_at) s->stop = 1;
    return 0;
}

static int count_epoch(const hpml_epoch *e, void *user)
{
    seen *s = (seen *)user;
    s->epochs++;
    s->last = *e;
    return 0;
}

TEST(an_epochs_means_are_those_of_its_steps)
{
    learner       l = learner_create();
    seen          s = { 0 };
    hpml_metrics  m = { 0 };
    hpml_epoch    rows[2];
    hpml_fit_desc d = { .on_step = count_step, .on_epoch = count_epoch, .user = &s, .validation = l.validation };
    ENSURE(hpml_trainer_fit(l.t, l.data, &d) == HPML_OK && s.epochs == 1 && s.steps == 6 && s.samples == 48);
    ENSURE_NEAR(s.last.loss, s.loss / 48, 1e-9);
    ENSURE_NEAR(s.last.accuracy, s.accuracy / 48, 1e-6);
    ENSURE(hpml_trainer_evaluate(l.t, l.validation, &m) == HPML_OK && m.samples == 100);
    ENSURE(s.last.validated && s.last.best && s.last.val_loss == m.loss && s.last.val_accuracy == m.accuracy);
    ENSURE(hpml_trainer_fit(l.t, l.data, &d) == HPML_OK);
    ENSURE(hpml_trainer_history(l.t, rows, 2) == 2 && rows[0].epoch == 0 && rows[1].epoch == 1 && rows[1].step == 12);
    ENSURE(hpml_trainer_history(l.t, rows, 1) == 2 && rows[0].epoch == 1 && hpml_trainer_history(l.t, NULL, 0) == 2);
    ENSURE(hpml_trainer_history(NULL, rows, 2) == 0);
    hpml_ctx_free(l.ctx);
}

TEST(validation_does_not_change_what_is_trained)
{
    learner a = learner_create(), b = learner_create();
    hpml_trainer_fit(a.t, a.data, &(hpml_fit_desc){ .epochs = 5 });
    hpml_trainer_fit(b.t, b.data, &(hpml_fit_desc){ .epochs = 5, .validation = b.validation, .patience = 100 });
    ENSURE(hpml_ctx_status(b.ctx) == HPML_OK && hpml_param_hash(a.ctx) == hpml_param_hash(b.ctx));
    hpml_ctx_free(a.ctx);
    hpml_ctx_free(b.ctx);
}

/* Trains without early stopping for 30 epochs; returns the hash after the epoch with the smallest validation loss. */
static uint64_t best_by_hand(int *best, int epochs)
{
    learner  l = learner_create();
    double   least = 1e30;
    uint64_t hash = 0;
    for (int e = 0; e < epochs; e++) {
        hpml_metrics m = { 0 };
        hpml_trainer_fit(l.t, l.data, NULL);
        hpml_trainer_evaluate(l.t, l.validation, &m);
        if (m.loss >= least) continue;
        least = m.loss;
        *best = e;
        hash  = hpml_param_hash(l.ctx);
    }
    hpml_ctx_free(l.ctx);
    return hash;
}

TEST(early_stopping_keeps_the_best_weights)
{
    learner       l = learner_create();
    int           best = 0;
    hpml_epoch    rows[64];
    uint64_t      hash = best_by_hand(&best, 40);
    hpml_fit_desc d = { .epochs = 40, .validation = l.validation, .patience = 5, .keep_best = true };
    ENSURE(hpml_trainer_fit(l.t, l.data, &d) == HPML_OK && hpml_param_hash(l.ctx) == hash);
    int n = hpml_trainer_history(l.t, rows, 64);
    ENSURE(best > 0 && best + 6 < 40 && n == best + 1 + 5 && rows[best].best && !rows[n - 1].best);
    hpml_ctx_free(l.ctx);
}

TEST(min_delta_ignores_small_progress)
{
    learner    l = learner_create();
    hpml_epoch rows[64];
    hpml_trainer_fit(l.t, l.data, &(hpml_fit_desc){ .epochs = 40, .validation = l.validation, .patience = 3,
                                                    .min_delta = 100 });
    ENSURE(hpml_trainer_history(l.t, rows, 64) == 4 && rows[0].best && !rows[1].best);
    hpml_ctx_free(l.ctx);
}

/* The number of updates that the checkpoint `name` was saved after; -1: there is no such file. */
static int steps_in(hpml_ctx *ctx, const char *name)
{
    const char *path = file(name);
    if (access(path, R_OK) != 0) return -1;
    hpml_safetensors *f = hpml_safetensors_open(ctx, path);
    int steps = f ? atoi(hpml_safetensors_meta(f, "hpml.step")) : -2;
    hpml_safetensors_close(f);
    return steps;
}

static const char *named(char *path, const char *name) { return strcpy(path, file(name)); }

TEST(checkpoints_are_kept_and_continued)
{
    char    path[160];
    seen    s = { .stop_at = 20 };
    learner a = learner_create(), b = learner_create(), c = learner_create();
    hpml_fit_desc d = { .epochs = 6, .checkpoint = named(path, "keep"), .checkpoint_steps = 4, .checkpoint_keep = 3,
                        .resume = true, .on_step = count_step, .user = &s, .stop = &s.stop };
    ENSURE(hpml_trainer_fit(a.t, a.data, &(hpml_fit_desc){ .epochs = 6 }) == HPML_OK);
    ENSURE(hpml_trainer_fit(b.t, b.data, &d) == HPML_ERR_STOPPED && hpml_trainer_step_count(b.t) == 20);
    ENSURE(steps_in(b.ctx, "keep") == 20 && steps_in(b.ctx, "keep.1") == 16 && steps_in(b.ctx, "keep.2") == 12 &&
           steps_in(b.ctx, "keep.3") == -1);
    d.on_step = NULL, d.stop = NULL;
    ENSURE(hpml_trainer_fit(c.t, c.data, &d) == HPML_OK && hpml_trainer_step_count(c.t) == 36);
    ENSURE(hpml_param_hash(c.ctx) == hpml_param_hash(a.ctx));
    remove(path); /* as if the program had been killed between renaming and saving */
    ENSURE(hpml_trainer_fit(b.t, b.data, &d) == HPML_OK && hpml_param_hash(b.ctx) == hpml_param_hash(a.ctx));
    hpml_ctx_free(a.ctx);
    hpml_ctx_free(b.ctx);
    hpml_ctx_free(c.ctx);
}

TEST(an_interrupted_search_for_the_best_epoch_goes_on)
{
    char          path[160];
    int           best = 0;
    uint64_t      hash = best_by_hand(&best, 40);
    hpml_fit_desc d    = { .epochs = best + 3, .patience = 5, .keep_best = true, .checkpoint = named(path, "best"),
                           .resume = true };
    for (int k = 0; k < 2; k++) {
        learner l = learner_create();
        d.validation = l.validation;
        ENSURE(hpml_trainer_fit(l.t, l.data, &d) == HPML_OK && hpml_param_hash(l.ctx) == hash);
        ENSURE(k == 0 || hpml_trainer_step_count(l.t) == 6 * (best + 6)); /* 5 epochs of patience after the best one */
        d.epochs = 40;
        hpml_ctx_free(l.ctx);
    }
}

TEST(checkpoints_by_time_and_by_epoch)
{
    char          path[160];
    learner       l = learner_create();
    hpml_fit_desc d = { .checkpoint = named(path, "time"), .checkpoint_minutes = 1e-9, .checkpoint_keep = 2 };
    ENSURE(hpml_trainer_fit(l.t, l.data, &d) == HPML_OK && steps_in(l.ctx, "time.1") == 5);
    d.checkpoint_minutes = 1e9;
    ENSURE(hpml_trainer_fit(l.t, l.data, &d) == HPML_OK); /* saves at its end alone */
    ENSURE(steps_in(l.ctx, "time") == 12 && steps_in(l.ctx, "time.1") == 6);
    hpml_fit_desc each = { .epochs = 3, .checkpoint = named(path, "epoch"), .checkpoint_keep = 4 };
    ENSURE(hpml_trainer_fit(l.t, l.data, &each) == HPML_OK && steps_in(l.ctx, "epoch") == 30 &&
           steps_in(l.ctx, "epoch.2") == 18 && steps_in(l.ctx, "epoch.3") == -1);
    hpml_ctx_free(l.ctx);
}

TEST(fit_refuses_senseless_fields)
{
    static const struct { hpml_fit_desc d; const char *says; } bad[] = {
        { { .patience = 2 }, "need validation data" }, { { .keep_best = true }, "need validation data" },
        { { .patience = -1 }, "below 0" }, { { .checkpoint_steps = 3 }, "need .checkpoint" },
        { { .resume = true }, "need .checkpoint" }, { { .checkpoint = "x", .checkpoint_keep = -1 }, "below 0" },
        { { .checkpoint = "x", .checkpoint_minutes = NAN }, "below 0" } };
    learner l = learner_create();
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        ENSURE_ERROR(l.ctx, hpml_trainer_fit(l.t, l.data, &bad[i].d) != HPML_OK, HPML_ERR_ARGUMENT, bad[i].says);
    ENSURE_ERROR(l.ctx, hpml_trainer_fit(l.t, l.data, &(hpml_fit_desc){ .checkpoint = "build/none/x" }) != HPML_OK,
                 HPML_ERR_WRITE, "build/none/x");
    hpml_ctx_free(l.ctx);
}

/* Outputs of a trainer whose output is its input, for metrics against sums made here. */
enum { ROWS = 37, WIDE = 3 };
static hpml_metrics metrics_of(hpml_loss loss, const float *y, const float *target)
{
    hpml_ctx        *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1 });
    hpml_tensor     *x   = hpml_input_2d(ctx, 8, WIDE);
    hpml_linear_desc one = { .name = "one", .no_bias = true };
    const float      identity[WIDE * WIDE] = { 1, 0, 0, 0, 1, 0, 0, 0, 1 };
    const int64_t    shape[1] = { WIDE };
    hpml_metrics     m = { .want_auc = true };
    hpml_tensor     *out = hpml_linear(x, WIDE, &one);
    hpml_trainer    *t   = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = x, .output = out, .loss = loss,
                                                                      .no_finite_check = true });
    hpml_tensor_set(hpml_param_find(ctx, "one.weight"), identity, WIDE * WIDE);
    hpml_dataset *d = hpml_dataset_create(ctx, ROWS, HPML_DTYPE_F32, 1, shape, y, HPML_DTYPE_F32, WIDE, target);
    hpml_trainer_evaluate(t, d, &m);
    if (hpml_ctx_status(ctx) != HPML_OK) printf("    %s\n", hpml_ctx_error(ctx));
    hpml_ctx_free(ctx);
    return m;
}

/* The area under the ROC curve by all pairs of outputs; -1: there is no pair. */
static double area_by_pairs(const float *y, const float *target, int n)
{
    double won = 0, pairs = 0;
    for (int i = 0; i < n; i++)
        for (int k = 0; k < n; k++) {
            if (target[i] <= 0.5f || target[k] > 0.5f) continue;
            won += y[i] > y[k] ? 1 : y[i] == y[k] ? 0.5 : 0;
            pairs++;
        }
    return pairs > 0 ? won / pairs : -1;
}

TEST(area_under_the_roc_curve)
{
    static float y[ROWS * WIDE], label[ROWS * WIDE];
    const int    n = ROWS * WIDE;
    hpml_rng     r = { .seed = 4 };
    for (int kind = 0; kind < 4; kind++) {
        for (int i = 0; i < n; i++) y[i] = hpml_rng_normal(&r);
        for (int i = 0; i < n; i++) label[i] = y[i] + 2 * hpml_rng_normal(&r) > 0.5f;
        for (int i = 0; i < n && kind == 1; i++) y[i] = rintf(y[i]); /* ties, also of 0 and -0 */
        for (int i = 0; i < n && kind > 1; i++) label[i] = kind == 2; /* no pair */
        ENSURE_NEAR(metrics_of(HPML_LOSS_BCE, y, label).auc, area_by_pairs(y, label, n), 1e-12);
    }
    ENSURE(metrics_of(HPML_LOSS_MSE, y, label).auc == -1);
    y[5] = NAN;
    ENSURE(isnan(metrics_of(HPML_LOSS_BCE, y, label).auc));
}

/* Trains on some ranks, each of which then evaluates all data: all get one area, that of the outputs. */
static hpml_status area_on_ranks(hpml_comm *c, void *user)
{
    double       *area = (double *)user;
    hpml_ctx     *ctx  = hpml_comm_ctx(c);
    hpml_tensor  *x    = hpml_input_2d(ctx, 8, WIDE);
    hpml_tensor  *out  = hpml_linear(hpml_tanh(hpml_linear(x, 5, NULL)), 1, NULL);
    hpml_trainer *t    = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = x, .output = out,
                                                                        .loss = HPML_LOSS_BCE, .lr = 0.2f });
    static float       v[2][ROWS * WIDE], label[2][ROWS], y[2][ROWS];
    const int          rank = hpml_comm_rank(c);
    hpml_rng           r = { .seed = 6 };
    for (int i = 0; i < ROWS * WIDE; i++) v[rank][i] = hpml_rng_normal(&r);
    for (int i = 0; i < ROWS; i++) label[rank][i] = v[rank][i * WIDE] + hpml_rng_normal(&r) > 0;
    hpml_dataset *d = hpml_dataset_create(ctx, ROWS, HPML_DTYPE_F32, 1, (const int64_t[1]){ WIDE }, v[rank],
                                          HPML_DTYPE_F32, 1, label[rank]);
    hpml_metrics  m = { .want_auc = true };
    hpml_distribute(t, c, &(hpml_plan){ .global_batch = 8 });
    hpml_trainer_fit(t, d, &(hpml_fit_desc){ .epochs = 3 });
    hpml_trainer_evaluate(t, d, &m);
    area[rank] = m.auc;
    hpml_trainer_predict(t, v[rank], ROWS, y[rank]);
    area[2 + rank] = area_by_pairs(y[rank], label[rank], ROWS);
    return hpml_ctx_status(ctx);
}
TEST(ranks_find_the_same_area_under_the_roc_curve)
{
    double area[4] = { 0 };
    char   error[256] = "";
    hpml_launch_desc d = { .ranks = 2, .ctx = { .threads = 1, .seed = 3 } };
    if (hpml_launch(&d, area_on_ranks, area, error, sizeof error) != HPML_OK) printf("    %s\n", error);
    ENSURE(area[0] == area[1] && area[0] > 0.6 && area[0] < 1);
    ENSURE_NEAR(area[0], area[2], 1e-12);
}

TEST(regression_and_binary_metrics)
{
    float    y[ROWS * WIDE], target[ROWS * WIDE], label[ROWS * WIDE];
    double   absolute = 0, square = 0, mean = 0, spread = 0, right = 0, found = 0, claimed = 0, wanted = 0;
    const int n = ROWS * WIDE;
    hpml_rng r = { .seed = 2 };
    hpml_rng_fill_normal(&r, y, n);
    for (int i = 0; i < n; i++) target[i] = 10 + y[i] + 0.3f * hpml_rng_normal(&r);
    for (int i = 0; i < n; i++) label[i] = y[i] + hpml_rng_normal(&r) > 0.5f;
    for (int i = 0; i < n; i++) mean += (double)target[i] / n;
    for (int i = 0; i < n; i++) {
        absolute += fabs((double)y[i] - (double)target[i]) / n;
        square += pow((double)y[i] - (double)target[i], 2) / n;
        spread += pow((double)target[i] - mean, 2) / n;
        right += (y[i] > 0) == (label[i] > 0);
        found += y[i] > 0 && label[i] > 0;
        claimed += y[i] > 0;
        wanted += label[i] > 0;
    }
    hpml_metrics m = metrics_of(HPML_LOSS_MSE, y, target), b = metrics_of(HPML_LOSS_BCE, y, label);
    ENSURE_NEAR(m.mae, absolute, 1e-6 * absolute);
    ENSURE_NEAR(m.rmse, sqrt(square), 1e-6 * sqrt(square));
    ENSURE_NEAR(m.r2, 1 - square / spread, 1e-5 * square / spread);
    ENSURE(m.samples == ROWS && m.accuracy == -1 && m.precision == -1 && m.recall == -1);
    ENSURE_NEAR(b.accuracy, right / n, 1e-12);
    ENSURE_NEAR(b.precision, found / claimed, 1e-12);
    ENSURE_NEAR(b.recall, found / wanted, 1e-12);
    ENSURE(b.mae == -1 && b.rmse == -1 && b.r2 == 0);
}

/* Several ranks: each notes its history. */
enum { RANKS = 3, EPOCHS = 40 };
typedef struct together {
    hpml_plan   plan;
    const char *checkpoint;
    int         stop_at, epochs, count[RANKS];
    hpml_epoch  rows[RANKS][EPOCHS];
    uint64_t    hash[RANKS];
    double      alone; /* rank 0's loss on all validation data in the end */
    hpml_status status[RANKS];
} together;

static hpml_status train_together(hpml_comm *c, void *user)
{
    together *g    = (together *)user;
    const int rank = hpml_comm_rank(c);
    learner   l;
    seen      s = { .stop_at = rank == 1 ? g->stop_at : 0 }; /* the signal reaches one rank alone */
    learner_fill(&l, hpml_comm_ctx(c), 8);
    g->plan.global_batch = 8;
    hpml_distribute(l.t, c, &g->plan);
    hpml_fit_desc d = { .epochs = g->epochs, .validation = l.validation, .patience = 4, .keep_best = true,
                        .checkpoint = g->checkpoint, .resume = g->checkpoint != NULL, .stop = &s.stop };
    if (rank == 1) d.on_step = count_step;
    d.user = &s;
    g->status[rank] = hpml_trainer_fit(l.t, l.data, &d);
    if (hpml_ctx_status(l.ctx) != HPML_OK) return hpml_ctx_status(l.ctx);
    hpml_metrics m = { 0 };
    hpml_trainer_evaluate(l.t, l.validation, &m);
    if (rank == 0) g->alone = m.loss;
    g->count[rank] = hpml_trainer_history(l.t, g->rows[rank], EPOCHS);
    g->hash[rank]  = hpml_param_hash(l.ctx);
    return hpml_ctx_status(l.ctx);
}

static bool launch(together *g)
{
    char error[512];
    bool ok = hpml_launch(&(hpml_launch_desc){ .ranks = RANKS, .ctx = { .threads = 1, .seed = 3 } }, train_together, g,
                          error, sizeof error) == HPML_OK;
    if (!ok) printf("    %s\n", error);
    return ok;
}

static bool all_agree(const together *g)
{
    for (int r = 1; r < RANKS; r++) {
        if (g->hash[r] != g->hash[0] || g->count[r] != g->count[0] || g->status[r] != g->status[0]) return false;
        for (int e = 0; e < g->count[0]; e++)
            if (g->rows[r][e].val_loss != g->rows[0][e].val_loss || g->rows[r][e].loss != g->rows[0][e].loss)
                return false;
    }
    return true;
}

TEST(ranks_stop_early_together)
{
    static together g, twice[2];
    double          least = 1e30;
    g.epochs = EPOCHS;
    ENSURE(launch(&g) && all_agree(&g) && g.status[0] == HPML_OK && g.count[0] > 5 && g.count[0] < EPOCHS);
    for (int e = 0; e < g.count[0]; e++) least = fmin(least, g.rows[0][e].val_loss);
    ENSURE_NEAR(g.alone, least, 1e-6); /* the best weights are back, and the ranks' parts add up to all data */
    ENSURE(g.rows[0][0].samples == 48);
    char path[160];
    for (int k = 0; k < 2; k++) { /* a signal interrupts the first call; the second goes on */
        twice[k].epochs     = EPOCHS;
        twice[k].checkpoint = named(path, "ranks");
        twice[k].stop_at    = k == 0 ? 7 : 0;
        ENSURE(launch(&twice[k]) && all_agree(&twice[k]));
    }
    ENSURE(twice[0].status[0] == HPML_ERR_STOPPED && twice[1].status[0] == HPML_OK);
    ENSURE(twice[1].hash[0] == g.hash[0]);
}

TEST(ranks_of_each_strategy_validate_and_save_together)
{
    char path[160];
    for (int k = -1; k < HPML_STRATEGY_COUNT; k++) {
        together g = { .epochs = 2, .checkpoint = named(path, "strategy") };
        g.plan.strategy = k < 0 ? HPML_STRATEGY_SYNC : (hpml_strategy_kind)k;
        if (k < 0) g.plan.codec.kind = HPML_CODEC_ONEBIT;
        g.plan.backup = k == HPML_STRATEGY_BACKUP;
        bool servers  = k == HPML_STRATEGY_PS || k == HPML_STRATEGY_BACKUP || k == HPML_STRATEGY_SSP ||
                       k == HPML_STRATEGY_ASYNC || k == HPML_STRATEGY_FEDERATED;
        bool period   = k == HPML_STRATEGY_LOCAL || k == HPML_STRATEGY_BLOCK || k == HPML_STRATEGY_ELASTIC;
        g.plan.servers = servers;
        if (period) g.plan.period = 2;
        remove(path);
        remove(file("strategy.best"));
        bool same = launch(&g) && g.count[0] == 2;
        for (int r = 1; r < RANKS && same; r++)
            same = g.count[r] == 2 && g.rows[r][0].val_loss == g.rows[0][0].val_loss &&
                   g.rows[r][1].val_loss == g.rows[0][1].val_loss && g.rows[r][1].best == g.rows[0][1].best;
        if (!same || access(path, R_OK) != 0) printf("    strategy %d\n", k), test_failed = 1;
    }
}

/* Data of a function: number i gives x = (i, i^2) / 100, a mask and a second target; labels are i % 2. */
typedef struct source { int64_t calls, wrong, fail_at; uint64_t numbers; bool floats; } source;
static hpml_status make(void *user, int64_t epoch, const int64_t *numbers, int64_t count, void *const *arrays)
{
    source *s = (source *)user;
    s->calls++;
    if (s->fail_at && s->calls >= s->fail_at) return HPML_ERR_READ;
    for (int64_t i = 0; i < count; i++) {
        const float v = (float)numbers[i];
        ((float *)arrays[0])[2 * i]     = v / 100;
        ((float *)arrays[0])[2 * i + 1] = v * v / 100;
        ((int32_t *)arrays[1])[i]       = (int32_t)numbers[i] % 2;
        ((float *)arrays[2])[i]         = v;
        s->numbers += (uint64_t)(numbers[i] * (epoch + 1));
    }
    return HPML_OK;
}

/* The same data in arrays of the program, which are not copied. */
enum { MADE = 60 };
static float   made_x[MADE][2], made_extra[MADE];
static int32_t made_y[MADE];
static hpml_dataset made(hpml_ctx *ctx, source *s)
{
    hpml_dataset d = { .ctx = ctx, .count = MADE, .x_dtype = HPML_DTYPE_F32, .x_ndim = 1, .x_shape = { 2 },
                       .y_dtype = HPML_DTYPE_I32, .y_size = 1, .extra_count = 1,
                       .extra = { { HPML_DTYPE_F32, 1, NULL } } };
    for (int i = 0; i < MADE; i++) {
        made_x[i][0] = (float)i / 100, made_x[i][1] = (float)(i * i) / 100;
        made_y[i]     = i % 2;
        made_extra[i] = (float)i;
    }
    d.fill = s ? make : NULL, d.fill_user = s;
    if (!s) d.x = made_x, d.y = made_y, d.extra[0].data = made_extra;
    return d;
}

/* A model with two inputs: the class depends on x, and on the further input times a parameter. */
static hpml_trainer *two_inputs(hpml_ctx *ctx, int64_t batch)
{
    hpml_tensor *x = hpml_input_2d(ctx, batch, 2), *m = hpml_input_2d(ctx, batch, 1);
    hpml_tensor *h = hpml_concat((hpml_tensor *[]){ x, hpml_scale(m, 0.01f, 0) }, 2, 1);
    return hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = x, .output = hpml_linear(h, 2, NULL), .lr = 0.1f,
                                                          .extra = &m, .extra_count = 1 });
}

TEST(data_of_a_function_and_of_own_arrays)
{
    hpml_ctx    *ctx[2];
    uint64_t     hash[2];
    float        out[2][MADE * 2];
    hpml_metrics m[2];
    for (int k = 0; k < 2; k++) {
        source s = { 0 };
        ctx[k]   = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1, .seed = 4 });
        hpml_trainer *t = two_inputs(ctx[k], 8);
        hpml_dataset  d = made(ctx[k], k == 0 ? &s : NULL), *a, *b;
        size_t before = hpml_ctx_bytes(ctx[k]);
        ENSURE(hpml_trainer_fit(t, &d, &(hpml_fit_desc){ .epochs = 3 }) == HPML_OK);
        ENSURE(hpml_ctx_bytes(ctx[k]) == before);
        ENSURE(k > 0 || (s.calls >= 24 && s.numbers >= 59 * 30 * (1 + 2 + 3)));
        ENSURE(hpml_dataset_split(&d, 0.75, 7, &a, &b) == HPML_OK && a->count == 45 && b->count == 15);
        ENSURE(hpml_trainer_fit(t, hpml_dataset_slice(a, 5, 30), NULL) == HPML_OK);
        ENSURE(hpml_trainer_fit(t, hpml_dataset_slice(&d, 7, 21), NULL) == HPML_OK);
        m[k].confusion = NULL;
        ENSURE(hpml_trainer_evaluate(t, b, &m[k]) == HPML_OK && m[k].samples == 15);
        ENSURE(hpml_trainer_predict_data(t, &d, out[k]) == HPML_OK);
        hash[k] = hpml_param_hash(ctx[k]);
    }
    ENSURE(hash[0] == hash[1] && m[0].loss == m[1].loss && memcmp(out[0], out[1], sizeof out[0]) == 0);
    for (int k = 0; k < 2; k++) hpml_ctx_free(ctx[k]);
}

TEST(a_function_that_fails_and_wrong_data)
{
    hpml_ctx     *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1 });
    source        s   = { .fail_at = 3 };
    hpml_trainer *t   = two_inputs(ctx, 8);
    hpml_dataset  d   = made(ctx, &s);
    ENSURE_ERROR(ctx, hpml_trainer_fit(t, &d, NULL), HPML_ERR_READ, "failed in batch 2 of epoch 0");
    d.extra_count = 0;
    ENSURE_ERROR(ctx, hpml_trainer_fit(t, &d, NULL), HPML_ERR_SHAPE, "have 0 arrays besides x and y");
    d = made(ctx, NULL);
    d.extra[0].size = 2;
    ENSURE_ERROR(ctx, hpml_trainer_fit(t, &d, NULL), HPML_ERR_SHAPE, "has 2 numbers of f32");
    d = made(ctx, NULL);
    d.x_shape[0] = 0;
    ENSURE_ERROR(ctx, hpml_trainer_fit(t, &d, NULL), HPML_ERR_ARGUMENT, "sizes in x_shape");
    d = made(ctx, NULL);
    d.x = NULL;
    ENSURE_ERROR(ctx, hpml_trainer_fit(t, &d, NULL), HPML_ERR_ARGUMENT, "needs a count, and x or fill");
    hpml_dataset *a, *b;
    ENSURE_ERROR(ctx, hpml_dataset_split(&d, 1.5, 0, &a, &b), HPML_ERR_ARGUMENT, "1.5 of 60");
    hpml_tensor *y = hpml_linear(hpml_input_2d(ctx, 4, 2), 2, NULL);
    ENSURE_ERROR(ctx, !hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = y, .output = y, .extra = &y,
                                                                      .extra_count = 1 }),
                 HPML_ERR_ARGUMENT, ".extra");
    hpml_ctx_free(ctx);
}

TEST(a_split_is_a_partition)
{
    hpml_ctx     *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1 });
    hpml_dataset  d   = made(ctx, NULL), *part[3], *rest;
    bool          seen_before[MADE] = { 0 };
    hpml_batch    batch;
    int           total = 0, moved = 0;
    ENSURE(hpml_dataset_split(&d, 0.5, 1, &part[0], &rest) == HPML_OK &&
           hpml_dataset_split(rest, 0.3, 2, &part[1], &part[2]) == HPML_OK && part[1]->count == 9);
    for (int k = 0; k < 3; k++) {
        hpml_loader *l = hpml_loader_create(ctx, part[k], &(hpml_loader_desc){ .batch = 7, .in_order = true });
        while (hpml_loader_next(l, &batch))
            for (int64_t i = 0; i < batch.samples; i++, total++) {
                int number = (int)((const float *)batch.extra[0])[i];
                ENSURE(!seen_before[number] && ((const int32_t *)batch.y)[i] == number % 2 &&
                       ((const float *)batch.x)[2 * i] == made_x[number][0]);
                seen_before[number] = true;
                moved += number != total;
            }
        hpml_loader_free(l);
    }
    ENSURE(total == MADE && moved > MADE / 2);
    hpml_ctx_free(ctx);
}

static hpml_status train_made(hpml_comm *c, void *user)
{
    source        s = { 0 };
    hpml_dataset  d = made(hpml_comm_ctx(c), &s);
    hpml_trainer *t = two_inputs(hpml_comm_ctx(c), 8);
    if (hpml_comm_size(c) > 1) hpml_distribute(t, c, &(hpml_plan){ .global_batch = 8 });
    hpml_trainer_fit(t, &d, &(hpml_fit_desc){ .epochs = 2 });
    if (hpml_comm_rank(c) == 0) hpml_tensor_get(hpml_param_find(hpml_comm_ctx(c), "linear0.weight"), (float *)user, 6);
    return hpml_ctx_status(hpml_comm_ctx(c));
}

TEST(ranks_take_their_shares_of_a_functions_samples)
{
    float w[2][6];
    for (int k = 0; k < 2; k++)
        ENSURE(hpml_launch(&(hpml_launch_desc){ .ranks = k ? 3 : 1, .ctx = { .threads = 1, .seed = 2 } }, train_made,
                           w[k], NULL, 0) == HPML_OK);
    for (int i = 0; i < 6; i++) ENSURE_NEAR(w[1][i], w[0][i], 1e-5);
}

TEST(columns_are_standardized_inside_the_model)
{
    enum { N = 500 };
    static float  x[N][3], y[N];
    double        mean[3] = { 0 }, square[3] = { 0 };
    float         m[3], s[3], my[1], sy[1], out[N];
    const int64_t shape[1] = { 3 };
    hpml_rng      r = { .seed = 8 };
    for (int i = 0; i < N; i++) {
        x[i][0] = 1e4f + 3 * hpml_rng_normal(&r), x[i][1] = 0.01f * hpml_rng_normal(&r), x[i][2] = 7;
        y[i]    = 1e5f + 2000 * (x[i][0] - 1e4f) - 3e5f * x[i][1];
        for (int k = 0; k < 3; k++) mean[k] += (double)x[i][k] / N;
    }
    for (int i = 0; i < N; i++)
        for (int k = 0; k < 3; k++) square[k] += pow((double)x[i][k] - mean[k], 2) / N;
    hpml_ctx     *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1 }), *other = hpml_ctx_create(NULL);
    hpml_dataset *d = hpml_dataset_create(ctx, N, HPML_DTYPE_F32, 1, shape, x, HPML_DTYPE_F32, 1, y);
    ENSURE(hpml_dataset_stats(d, HPML_STATS_COLUMNS, NULL, NULL) == 3);
    ENSURE(hpml_dataset_stats(d, HPML_STATS_COLUMNS, m, s) == 3);
    ENSURE(hpml_dataset_stats(d, HPML_STATS_TARGETS, my, sy) == 1);
    for (int k = 0; k < 3; k++) ENSURE_NEAR(m[k], mean[k], 1e-6 * fabs(mean[k]) + 1e-9);
    for (int k = 0; k < 2; k++) ENSURE_NEAR(s[k], sqrt(square[k]), 1e-5 * sqrt(square[k]));
    ENSURE(s[2] == 1);
    hpml_tensor  *in = hpml_input_2d(ctx, 20, 3), *h = hpml_standardize(in, 3, m, s, "columns");
    hpml_tensor  *z  = hpml_unstandardize(hpml_linear(h, 1, NULL), 1, my, sy, NULL), *t = hpml_input_2d(ctx, 20, 1);
    hpml_tensor  *loss = hpml_scale(hpml_mse(z, t), 1 / (sy[0] * sy[0]), 0);
    hpml_trainer_desc td = { .input = in, .output = z, .target = t, .lr = 0.2f, .loss_tensor = loss };
    hpml_trainer     *tr = hpml_trainer_create(ctx, &td);
    ENSURE(hpml_trainer_fit(tr, d, &(hpml_fit_desc){ .epochs = 8 }) == HPML_OK);
    char            path[160];
    hpml_model_desc md = { .outputs = &z, .output_count = 1 };
    ENSURE(hpml_model_save(ctx, named(path, "columns"), &md) == HPML_OK);
    hpml_model *model = hpml_model_load(other, path, 0);
    ENSURE(model && hpml_model_predict(model, x, N, out) == HPML_OK);
    for (int i = 0; i < N; i++) ENSURE_NEAR(out[i], y[i], 30);
    ENSURE_ERROR(ctx, !hpml_standardize(in, 2, m, s, NULL), HPML_ERR_SHAPE, "expected 3");
    hpml_ctx_free(ctx);
    hpml_ctx_free(other);
}

TEST(class_weights_against_double_precision)
{
    enum { ROWS_ = 6, C = 3 };
    const float   weights[C] = { 0.5f, 2, 0 };
    const float   x[ROWS_ * C] = { 1, 2, 3, -1, 0, 2, 4, 4, 1, 0, 0, 0, -3, 1, 2, 1, 1, 5 };
    const int32_t labels[ROWS_] = { 0, 1, 2, HPML_IGNORE, 1, 2 };
    double        loss = 0, sum = 0;
    for (int i = 0; i < ROWS_; i++) {
        double e = 0;
        for (int c = 0; c < C; c++) e += exp((double)x[i * C + c]);
        if (labels[i] == HPML_IGNORE) continue;
        loss += (double)weights[labels[i]] * (log(e) - (double)x[i * C + labels[i]]);
        sum += (double)weights[labels[i]];
    }
    const float      identity[C * C] = { 1, 0, 0, 0, 1, 0, 0, 0, 1 };
    hpml_ctx        *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1 });
    hpml_tensor     *in  = hpml_input_2d(ctx, ROWS_, C);
    hpml_tensor     *y   = hpml_linear(in, C, &(hpml_linear_desc){ .name = "w" });
    hpml_trainer_desc d  = { .input = in, .output = y, .class_weights = weights };
    hpml_trainer    *t   = hpml_trainer_create(ctx, &d);
    hpml_step_info   info;
    hpml_tensor_set(hpml_param_find(ctx, "w.weight"), identity, C * C);
    ENSURE(hpml_trainer_step(t, x, labels, ROWS_, &info) == HPML_OK);
    ENSURE_NEAR(info.loss, loss / sum, 1e-6);
    ENSURE_NEAR(info.accuracy, 1 / 5.0, 1e-6);
    double wrong = hpml_check_grad(hpml_trainer_graph(t), 0, 9);
    ENSURE(wrong >= 0 && wrong < 1e-3);
    const float negative[C] = { 1, -1, 1 };
    d.class_weights = negative;
    ENSURE_ERROR(ctx, !hpml_trainer_create(ctx, &d), HPML_ERR_ARGUMENT, ".class_weights: expected 3 numbers");
    hpml_ctx_free(ctx);
}

TEST(a_log_has_a_line_for_each_step_and_epoch)
{
    char          path[160], line[512];
    int           steps = 0, epochs = 0;
    learner       l = learner_create();
    hpml_fit_desc d = { .epochs = 2, .log = named(path, "log.jsonl"), .validation = l.validation };
    ENSURE(hpml_trainer_fit(l.t, l.data, &d) == HPML_OK);
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof line, f)) {
        ENSURE(line[0] == '{' && strstr(line, "}\n"));
        steps += strstr(line, "{\"step\":") && strstr(line, "\"loss\":") && strstr(line, "\"lr\":0.0");
        epochs += strstr(line, "{\"epoch_end\":") && strstr(line, "\"val_loss\":") && strstr(line, "\"epoch_loss\":");
    }
    if (f) fclose(f);
    ENSURE(steps == 12 && epochs == 2);
    d.log = "build/none/log";
    ENSURE_ERROR(l.ctx, hpml_trainer_fit(l.t, l.data, &d), HPML_ERR_OPEN, "cannot append");
    hpml_ctx_free(l.ctx);
}

TEST(progress_fits_the_columns)
{
    char           text[128];
    hpml_step_info i = { .epoch = 1, .epoch_step = 18, .epoch_steps = 188, .loss = 0.25f, .accuracy = 0.5f,
                         .seconds = 10, .samples_per_second = 1234 };
    ENSURE(strcmp(hpml_progress_text(&i, 3, 79, text, sizeof text),
                  "epoch 2/3  step 18/188  loss 0.25  accuracy 50.00 %  1234/s  17 s left") == 0);
    for (int columns = 0; columns < 100; columns++) {
        ENSURE((int)strlen(hpml_progress_text(&i, 3, columns, text, sizeof text)) <= columns);
        ENSURE(strncmp("epoch 2/3  step 18/188", text, columns < 22 ? (size_t)(columns >= 9 ? 9 : 0) : 22) == 0);
    }
    i.accuracy = -1;
    ENSURE(!strstr(hpml_progress_text(&i, 3, 79, text, sizeof text), "accuracy"));
    ENSURE(strlen(hpml_progress_text(&i, 3, 79, text, 12)) < 12);
}
