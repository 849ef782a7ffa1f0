/* What you learn: a strategy of data parallelism of your own, as two hooks of the trainer. Difficulty 3 of 4.
   cc -O2 examples/28_own_strategy.c -o own_strategy -lm -lpthread && ./own_strategy
   Post-local SGD (Lin et al. 2018, "Don't Use Large Mini-Batches, Use Local SGD"): in the first steps all ranks average
   their gradients, because parameters still move fast; later each rank steps by itself, and only every PERIOD steps the
   ranks average their parameters. hpml_distribute is not used: all messages are two calls of hpml_allreduce.
   prints   a line for each of three runs on 4 ranks: averaging gradients in each step, parameters every 8 steps, and
            the first until step 100, then the second; accuracy, and the megabytes that a rank sent. */
#define HPML_IMPLEMENTATION
#include "../hpml_comm.h"
#include <stdio.h>
#include <stdlib.h>

enum { RANKS = 4, BATCH = 32, EPOCHS = 6, SAMPLES = 8000, INPUTS = 16, CLASSES = 4, PERIOD = 8, NEVER = 1 << 30 };

typedef struct strategy {
    hpml_comm *comm;
    int64_t    local_from; /* from this step on, parameters are averaged in place of gradients */
} strategy;

typedef struct run {
    int64_t local_from;
    double  accuracy, sent; /* of rank 0: share of right answers, megabytes */
} run;

/* Replaces an array that all ranks have by its mean over the ranks. */
static hpml_status average(strategy *s, hpml_trainer *t, hpml_array which)
{
    int64_t                   n;
    float                    *x    = hpml_trainer_array(t, which, &n); /* (n) all values, or all gradients */
    const hpml_allreduce_desc mean = { .reduce = HPML_MEAN };
    return hpml_allreduce(s->comm, x, n, &mean);
}

/* The hook `update`: called when all gradients of a step are final. It steps the parameters by the optimizer. */
static hpml_status update(void *user, hpml_trainer *t, const hpml_moment *at)
{
    strategy   *s      = (strategy *)user;
    const bool  local  = at->step >= s->local_from;
    hpml_status status = local ? HPML_OK : average(s, t, HPML_ARRAY_GRADIENTS);
    if (status == HPML_OK) status = hpml_trainer_update_inner(t);
    if (status == HPML_OK && local && (at->step + 1) % PERIOD == 0) status = average(s, t, HPML_ARRAY_VALUES);
    return status;
}

/* The hook `data`: fit may take this rank's share of each batch, because all ranks show the same mark of their data. */
static hpml_status same_data(void *user, hpml_trainer *t, uint64_t mark)
{
    strategy                 *s    = (strategy *)user;
    int64_t                   a[2] = { (int64_t)(mark >> 2), -(int64_t)(mark >> 2) };
    const hpml_allreduce_desc most = { .reduce = HPML_MAX, .element = HPML_ELEMENT_I64 };
    (void)t;
    hpml_status status = hpml_allreduce(s->comm, a, 2, &most);
    if (status != HPML_OK || a[0] == -a[1]) return status;
    return hpml_ctx_fail(hpml_comm_ctx(s->comm), HPML_ERR_ARGUMENT, "the ranks have different data");
}

/* Points around CLASSES random centres, each coordinate with noise. */
static hpml_dataset *clouds(hpml_ctx *ctx, int64_t n, uint64_t stream)
{
    const int64_t shape[1] = { INPUTS };
    float        *x = (float *)malloc(sizeof(float) * (size_t)n * INPUTS), centre[CLASSES * INPUTS];
    int32_t      *y = (int32_t *)malloc(sizeof(int32_t) * (size_t)n);
    hpml_rng      centres = { .seed = 3 }, noise = { .seed = 3, .stream = stream };
    hpml_dataset *d = NULL;
    hpml_rng_fill_normal(&centres, centre, CLASSES * INPUTS);
    for (int64_t i = 0; x && y && i < n; i++) {
        y[i] = (int32_t)hpml_rng_below(&noise, CLASSES);
        for (int k = 0; k < INPUTS; k++) x[i * INPUTS + k] = centre[y[i] * INPUTS + k] + 1.5f * hpml_rng_normal(&noise);
    }
    if (x && y) d = hpml_dataset_create(ctx, n, HPML_DTYPE_F32, 1, shape, x, HPML_DTYPE_I32, 1, y);
    free(x);
    free(y);
    return d;
}

static hpml_status train(hpml_comm *comm, void *user)
{
    run              *r    = (run *)user;
    hpml_ctx         *ctx  = hpml_comm_ctx(comm);
    strategy          s    = { .comm = comm, .local_from = r->local_from };
    hpml_hooks        mine = { .user = &s, .update = update, .data = same_data };
    hpml_tensor      *x    = hpml_input_2d(ctx, BATCH, INPUTS);                                 /* (B, 16) */
    hpml_trainer_desc desc = { .input = x, .output = hpml_linear(hpml_relu(hpml_linear(x, 32, NULL)), CLASSES, NULL),
                               .lr = 0.05f, .momentum = 0.9f };
    hpml_trainer     *t    = hpml_trainer_create(ctx, &desc);
    hpml_fit_desc     fit  = { .epochs = EPOCHS };
    hpml_metrics      m    = { 0 };
    hpml_counters     sent = { 0 };
    hpml_trainer_attach(t, &mine);
    hpml_trainer_set_shard(t, hpml_comm_rank(comm), RANKS, RANKS * BATCH, 0); /* fit reads this rank's share */
    hpml_trainer_fit(t, clouds(ctx, SAMPLES, 1), &fit);
    average(&s, t, HPML_ARRAY_VALUES); /* the result of the training is one model */
    hpml_comm_counters(comm, &sent);
    hpml_trainer_detach(t, &s); /* so that each rank evaluates by itself */
    hpml_trainer_evaluate(t, clouds(ctx, 2000, 2), &m);
    if (hpml_comm_rank(comm) == 0) {
        r->accuracy = m.accuracy;
        r->sent     = (double)sent.bytes / 1e6;
    }
    return hpml_ctx_status(ctx);
}

int main(void)
{
    const char *name[3]    = { "gradients in each step", "parameters every 8 steps", "the first, then the second" };
    const int64_t from[3]  = { NEVER, 0, 100 };
    for (int i = 0; i < 3; i++) {
        run              r = { .local_from = from[i] };
        char             error[256];
        hpml_launch_desc d = { .ranks = RANKS, .ctx = { .seed = 1, .threads = 1 } };
        if (hpml_launch(&d, train, &r, error, sizeof error) != HPML_OK) return fprintf(stderr, "%s\n", error), 1;
        printf("%-27s accuracy %.2f %%, %6.2f MB sent by a rank\n", name[i], 100 * r.accuracy, r.sent);
    }
    return 0;
}
