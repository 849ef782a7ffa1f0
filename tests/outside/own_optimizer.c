/* An optimizer of one's own: Lion (Chen et al. 2023, "Symbolic discovery of optimization algorithms"), a row of
   hpml_optimizer, trained on one worker and on two, and resumed from a checkpoint that holds its state. */
#include "../../hpml_comm.h"
#include <math.h>
#include <stdio.h>

/* w -= lr (sign(beta1 m + (1 - beta1) g) + weight_decay w); m = beta2 m + (1 - beta2) g */
static void lion_step(const hpml_update *u, float *w, float *g, float *const *state, int64_t n)
{
    float *m = state[0];
    for (int64_t i = 0; i < n; i++) {
        float c    = u->beta1 * m[i] + (1 - u->beta1) * g[i];
        float sign = (float)((c > 0) - (c < 0));
        w[i] -= u->lr * (sign + u->weight_decay * w[i]);
        m[i] = u->beta2 * m[i] + (1 - u->beta2) * g[i];
    }
}

static const hpml_optimizer lion = { .name = "lion", .state_count = 1, .states = { { .name = "mean" } },
                                     .lr = 1e-3f, .beta1 = 0.9f, .beta2 = 0.99f, .step = lion_step };

enum { BATCH = 32, SAMPLES = 512, STEPS = 240 };
typedef struct job { bool exact; const char *save, *load; int64_t steps; uint64_t hash; double loss; } job;

static hpml_status train(hpml_comm *comm, void *user)
{
    static const int64_t shape[] = { 2 };
    job          *j   = (job *)user;
    hpml_ctx     *ctx = hpml_comm_ctx(comm);
    float         x[SAMPLES * 2], y[SAMPLES];
    hpml_rng      r = { .seed = 7 };
    hpml_metrics  m = { 0 };
    hpml_rng_fill_normal(&r, x, SAMPLES * 2);
    for (int i = 0; i < SAMPLES; i++) y[i] = sinf(x[2 * i]) * x[2 * i + 1];
    hpml_dataset *data = hpml_dataset_create(ctx, SAMPLES, HPML_DTYPE_F32, 1, shape, x, HPML_DTYPE_F32, 1, y);
    hpml_tensor  *in = hpml_input_2d(ctx, BATCH, 2);
    hpml_tensor  *h = hpml_linear(in, 48, &(hpml_linear_desc){ .activation = HPML_ACT_TANH });
    hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = in, .output = hpml_linear(h, 1, NULL), .loss = HPML_LOSS_MSE, .custom_optimizer = &lion, .lr = 1e-2f,
        .weight_decay = 0.01f, .clip_norm = 1, .schedule = { .kind = HPML_SCHEDULE_COSINE, .total_steps = STEPS } });
    hpml_distribute(t, comm, &(hpml_plan){ .exact = j->exact, .global_batch = BATCH });
    if (j->load) hpml_checkpoint_load(t, j->load);
    hpml_trainer_fit(t, data, &(hpml_fit_desc){ .epochs = STEPS, .max_steps = j->steps });
    if (j->save && hpml_comm_rank(comm) == 0) hpml_checkpoint_save(t, j->save);
    hpml_trainer_evaluate(t, data, &m);
    if (hpml_comm_rank(comm) == 0) j->hash = hpml_param_hash(ctx), j->loss = m.loss;
    return hpml_ctx_status(ctx);
}

static int passed, failed;
static void check(bool good, const char *name)
{
    printf("%s %s\n", good ? "ok" : "FAIL", name);
    if (good) passed++;
    else failed++;
}

static bool run(int ranks, job *j)
{
    char text[300];
    bool good = hpml_launch(&(hpml_launch_desc){ .ranks = ranks, .ctx = { .threads = 1, .seed = 3 } }, train, j, text,
                            sizeof text) == HPML_OK;
    if (!good) printf("    %s\n", text);
    return good;
}

int main(void)
{
    const char *file = "build/own_optimizer.checkpoint";
    job first = { .steps = 1 }, one = { .steps = STEPS }, two = one, exact = { .exact = true, .steps = STEPS };
    job exact_two = exact, begun = { .steps = STEPS / 2, .save = file }, resumed = { .steps = STEPS / 2, .load = file };
    check(run(1, &first) && run(1, &one) && one.loss < first.loss / 10, "lion_learns");
    check(run(2, &two) && fabs(two.loss - one.loss) < 0.1 * first.loss, "two_workers_learn_as_much");
    check(run(1, &exact) && run(2, &exact_two) && exact.hash == exact_two.hash, "exact_sums_have_the_same_bits");
    check(run(1, &begun) && run(1, &resumed) && resumed.hash == one.hash, "a_checkpoint_holds_the_state");
    remove(file);
    printf("%d passed, %d failed, 0 skipped\n", passed, failed);
    return failed > 0;
}
