/* What you learn: one training loop, many plans: what each strategy costs on a slow network, and what it learns.
   cc -O2 examples/17_plans.c -o plans -lm -lpthread && ./plans             Difficulty 3 of 4.
   Four ranks train an MLP on digits in virtual time: 10 ms a step, links of 1 ms and 10 Mbit/s, one rank twice as slow.
   prints a line for each plan: accuracy, bytes sent by a rank, virtual seconds; a plan that is refused says why. Draws
   accuracy over seconds: build/plans.svg. Takes some seconds of real time.
   ./plans "strategy=local,period=20" "codec=onebit"    only these; --json: an object a line, with the weights' hash */
#define HPML_IMPLEMENTATION
#include "../hpml_comm.h"
#include "digits.h"
#include "plot.h"
#include "screen.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { RANKS = 4, BATCH = 32, LEARN = 4000, TEST = 1000, EPOCHS = 3, PARTS = 5, MOST = 16 };

static const char *const plans[] = {
    "", "codec=onebit", "delayed=1", "exact=1", "strategy=local,period=10", "strategy=local,period=50",
    "strategy=block,period=10", "strategy=elastic,period=10", "strategy=gossip", "strategy=gossip,topology=pairs",
    "strategy=gossip,codec=onebit", "strategy=ps,servers=1", "strategy=backup,servers=1,backup=1",
    "strategy=ssp,servers=1,staleness=3", "strategy=async,servers=2", "strategy=federated,servers=1,period=10",
};

static uint8_t images[(LEARN + TEST) * DIGITS_PIXELS];
static int32_t labels[LEARN + TEST];

typedef struct trial {
    hpml_plan plan;
    double    accuracy;
    int64_t   bytes;
    double    seconds;
    uint64_t  hash;
    float     at[EPOCHS * PARTS + 1], curve[EPOCHS * PARTS + 1]; /* seconds; rank 0's accuracy then */
    int       points;
} trial;

static hpml_dataset *digits(hpml_ctx *ctx, int first, int count)
{
    static const int64_t shape[1] = { DIGITS_PIXELS };
    return hpml_dataset_create(ctx, count, HPML_DTYPE_U8, 1, shape, images + (size_t)first * DIGITS_PIXELS,
                               HPML_DTYPE_I32, 1, labels + first);
}

/* A step takes virtual time: computing does not, unless the program says how long it takes. */
static int each_step(const hpml_step_info *info, void *user)
{
    (void)info;
    hpml_comm_compute((hpml_comm *)user, 0.01);
    return 0;
}

/* The loop, the same for all plans. */
static hpml_status train(hpml_comm *c, void *user)
{
    trial            *j     = (trial *)user;
    hpml_ctx         *ctx   = hpml_comm_ctx(c);
    hpml_dataset     *learn = digits(ctx, 0, LEARN), *test = digits(ctx, LEARN, TEST);
    hpml_tensor      *x     = hpml_input_2d(ctx, BATCH, DIGITS_PIXELS);              /* (B, 784) */
    hpml_tensor      *h     = hpml_relu(hpml_linear(x, 64, NULL));                   /* (B, 64) */
    hpml_trainer     *t     = hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = x, .output = hpml_linear(h, 10, NULL), .lr = 0.1f, .momentum = 0.5f });
    hpml_distributed *d     = hpml_distribute(t, c, &j->plan);
    int64_t           steps = (LEARN + RANKS * BATCH - 1) / (RANKS * BATCH);
    hpml_metrics      m     = { 0 };
    hpml_counters     sent;
    for (int part = 0; d && part < EPOCHS * PARTS; part++) {
        hpml_trainer_fit(t, learn, &(hpml_fit_desc){ .epochs = EPOCHS, .max_steps = (steps + PARTS - 1) / PARTS,
                                                     .on_step = each_step, .user = c });
        if (hpml_comm_rank(c) != 0 || hpml_trainer_evaluate(t, test, &m) != HPML_OK) continue;
        j->at[j->points]      = (float)hpml_comm_now(c);
        j->curve[j->points++] = (float)(100 * m.accuracy);
    }
    hpml_distribute_finish(d);
    hpml_comm_counters(c, &sent);
    if (hpml_comm_rank(c) != 0 || hpml_trainer_evaluate(t, test, &m) != HPML_OK) return hpml_ctx_status(ctx);
    j->accuracy = m.accuracy;
    j->bytes    = sent.bytes;
    j->seconds  = hpml_comm_now(c);
    j->hash     = hpml_param_hash(ctx);
    return HPML_OK;
}

/* Trains by the plan of the text and prints a line; false: the plan is refused, or training failed. */
static bool run(trial *j, const char *text, bool json)
{
    static const double slow[RANKS] = { 1, 1, 2, 1 };
    char             why[768];
    hpml_launch_desc d = { .transport = HPML_TRANSPORT_CLOCK, .ranks = RANKS, .ctx = { .seed = 1, .threads = 1 },
                           .network = { .inside = { 1e-3, 1.25e6 }, .slow = slow } };
    memset(j, 0, sizeof *j);
    if (hpml_plan_parse(text, &j->plan, why, sizeof why) != HPML_OK ||
        hpml_launch(&d, train, j, why, sizeof why) != HPML_OK) {
        if (json) {
            fprintf(stderr, "%s\n", why);
            return false;
        }
        printf("%-34s refused:\n", text);
        screen_paragraph(why);
        return false;
    }
    if (json)
        printf("{\"plan\": \"%s\", \"strategy\": \"%s\", \"accuracy\": %.4f, \"bytes\": %lld, "
               "\"virtual_seconds\": %.6f, \"weights_hash\": \"%016llx\"}\n", text,
               hpml_strategy_name(j->plan.strategy), j->accuracy, (long long)j->bytes, j->seconds,
               (unsigned long long)j->hash);
    else
        printf("%-34s %8.2f %% %12lld %10.2f\n", *text ? text : "(all zero: sync)", 100 * j->accuracy,
               (long long)j->bytes, j->seconds);
    fflush(stdout);
    return true;
}

int main(int argc, char **argv)
{
    static trial trials[MOST];
    plot_series  series[MOST];
    bool         json = argc > 1 && strcmp(argv[1], "--json") == 0;
    int          given = argc - 1 - json, count = 0;
    uint8_t     *y = (uint8_t *)malloc(LEARN + TEST);
    if (!y) return 1;
    digits_fill(1, 0, LEARN, images, y);
    digits_fill(2, 0, TEST, images + (size_t)LEARN * DIGITS_PIXELS, y + LEARN);
    for (int i = 0; i < LEARN + TEST; i++) labels[i] = y[i];
    free(y);
    if (!json) printf("%-34s %10s %12s %10s\n", "plan", "accuracy", "bytes", "seconds");
    int all = given > 0 ? given : (int)(sizeof plans / sizeof plans[0]);
    for (int i = 0; i < all && count < MOST; i++) {
        const char *text = given > 0 ? argv[1 + json + i] : plans[i];
        trial      *t = &trials[count];
        if (!run(t, text, json)) continue;
        series[count++] = (plot_series){ *text ? text : "sync", t->at, t->curve, t->points };
    }
    mkdir("build", 0777);
    if (plot_svg("build/plans.svg", "accuracy on a slow network", "virtual seconds", "% of test digits", series, count))
        return 1;
    return count == 0 || (given > 0 && count < given);
}
