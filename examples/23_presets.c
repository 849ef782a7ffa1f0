/* What you learn: which way of spreading a model over workers suits which model. Difficulty 2 of 4.
   cc -O2 examples/23_presets.c -o presets -lm -lpthread && ./presets [--steps N] [--ranks N]
   The three engines of Mariana (Zou et al. 2014), from one source:
     dp      each rank has the whole model, and a share of the samples; gradients are added up
     trick   convolutions like dp, but each rank has some rows of the large dense layer, which has most parameters:
             features and results travel instead of gradients ("one weird trick", Krizhevsky 2014)
     sparse  advertisements and clicks: a parameter server has a table of which a step touches few rows, and only these
             travel: pulled before the forward pass, their gradients pushed after the backward pass
   prints the loss at first and at last, the parameters of a rank and the KB that it sends in a step: trick less than
   dp, and sparse the same for a table of ten times as many rows. */
#define HPML_IMPLEMENTATION
#include "../hpml_comm.h"
#include "digits.h"
#include "options.h"

enum { BATCH = 32, FEATURES = 6, WIDTH = 8 };

typedef struct job {
    const char *name, *plan; /* the plan but for its last number, that of the workers */
    int64_t     words;       /* rows of the table; 0: digits */
    int32_t     workers, servers;
    bool        rows;        /* the large dense layer by rows */
    int64_t     steps;
    double      first, last; /* loss of the first and of the last tenth of the steps */
    int64_t     floats;
    double      kb;          /* sent by rank 0 in a step */
} job;

/* Images (B, 1, 28, 28) to scores (B, 10): 208 parameters in the convolution, 206,346 in the dense layers. */
static hpml_tensor *digits_model(hpml_tensor *x, const job *j)
{
    const hpml_conv2d_desc conv = { .kernel_h = 5, .padding_h = 2, .activation = HPML_ACT_RELU };
    const hpml_linear_desc wide = { .activation = HPML_ACT_RELU };
    x = hpml_max_pool2d(hpml_conv2d(x, 8, &conv), 4, 0, 0);                  /* (B, 8, 7, 7) */
    x = hpml_flatten(x);                                                     /* (B, 392) */
    x = j->rows ? hpml_linear_rows(x, 512, &wide) : hpml_linear(x, 512, &wide);
    return hpml_linear(x, 10, NULL); /* too small to be split */
}

/* Words (B, FEATURES) to the score (B, 1) of a click. */
static hpml_tensor *clicks_model(hpml_tensor *words, const job *j)
{
    const hpml_embedding_desc table = { .sparse = true, .init_scale = 0.1f };
    return hpml_linear(hpml_flatten(hpml_embedding(words, j->words, WIDTH, &table)), 1, NULL);
}

/* Sample `i`: some of the first 2,000 words, popular ones more often; clicked if more of them are even than odd. */
static void clicks_draw(int64_t i, int32_t *words, float *clicked)
{
    hpml_rng rng  = { .seed = 3, .stream = (uint64_t)i };
    int      even = 0;
    for (int f = 0; f < FEATURES; f++) {
        float u  = hpml_rng_uniform(&rng);
        words[f] = (int32_t)(2000 * u * u * u);
        even += words[f] % 2 == 0;
    }
    *clicked = 2 * even > FEATURES ? 1.0f : 0.0f;
}

/* Draws this rank's samples of step s, from number `first` on, and trains one step with them. */
static void step(hpml_trainer *t, const job *j, int64_t first, int64_t rows, hpml_step_info *info)
{
    static const float white = 1 / 255.0f;
    float   x[BATCH * DIGITS_PIXELS], clicked[BATCH];
    int32_t words[BATCH * FEATURES], label[BATCH];
    for (int64_t i = 0; i < rows; i++) {
        uint8_t image[DIGITS_PIXELS];
        if (j->words > 0) clicks_draw(first + i, words + i * FEATURES, clicked + i);
        else label[i] = digits_draw(7, first + i, image);
        for (int k = 0; k < DIGITS_PIXELS && j->words == 0; k++) x[i * DIGITS_PIXELS + k] = white * (float)image[k];
    }
    if (j->words > 0) hpml_trainer_step(t, words, clicked, rows, info);
    else hpml_trainer_step(t, x, label, rows, info);
}

/* Returns KB that this rank has sent until now, over all communicators of its mesh. */
static double kb_sent(hpml_comm *c)
{
    const hpml_mesh *m = hpml_comm_mesh(c);
    hpml_comm       *axis = m ? m->axis[HPML_AXIS_EXPERT] : NULL, *replicas = m ? m->replicas : NULL;
    hpml_counters    all = { 0 }, own = { 0 }, mean = { 0 };
    hpml_comm_counters(c, &all);
    if (axis && axis != c) hpml_comm_counters(axis, &own);
    if (replicas && replicas != c && replicas != axis) hpml_comm_counters(replicas, &mean);
    return (double)(all.bytes + own.bytes + mean.bytes) / 1e3;
}

static hpml_status train(hpml_comm *c, void *user)
{
    job          *j    = (job *)user;
    hpml_ctx     *ctx  = hpml_comm_ctx(c);
    const int64_t rows = BATCH / j->workers;
    hpml_tensor  *x = j->words > 0 ? hpml_input_tokens(ctx, rows, FEATURES) : hpml_input_4d(ctx, rows, 1, 28, 28);
    hpml_tensor  *y = j->words > 0 ? clicks_model(x, j) : digits_model(x, j);
    hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = x, .output = y, .loss = j->words > 0 ? HPML_LOSS_BCE : HPML_LOSS_CROSS_ENTROPY,
        .optimizer = HPML_OPT_ADAM, .lr = j->words > 0 ? 0.02f : 0.002f });
    double        first = 0, last = 0, before;
    const int64_t tenth = j->steps / 10;
    if (!hpml_distribute(t, c, NULL)) return hpml_ctx_status(ctx); /* by the plan of the launch */
    before = kb_sent(c);
    for (int64_t s = 0; s < j->steps && hpml_ctx_status(ctx) == HPML_OK; s++) {
        hpml_step_info info = { 0 };
        step(t, j, s * BATCH + hpml_comm_rank(c) * rows, rows, &info);
        if (s < tenth) first += (double)info.loss / (double)tenth;
        if (s >= j->steps - tenth) last += (double)info.loss / (double)tenth;
    }
    if (hpml_comm_rank(c) > 0) return hpml_ctx_status(ctx);
    j->first  = first;
    j->last   = last;
    j->floats = hpml_param_total(ctx);
    j->kb     = (kb_sent(c) - before) / (double)j->steps;
    return hpml_ctx_status(ctx);
}

int main(int argc, char **argv)
{
    const char  *clicks = "strategy=ps,servers=1,data";
    job          jobs[] = { { .name = "dp", .plan = "data" }, { .name = "trick", .plan = "expert", .rows = true },
                            { .name = "sparse, 5,000 rows", .plan = clicks, .words = 5000, .servers = 1 },
                            { .name = "sparse, 50,000 rows", .plan = clicks, .words = 50000, .servers = 1 } };
    int64_t      steps = 200, ranks = 4;
    const option table[] = { { "--steps", OPTION_COUNT, &steps, "N", "steps of training (200)" },
                             { "--ranks", OPTION_COUNT, &ranks, "N", "1, 2, 4 or 8 workers, threads (4)" } };
    int          failed = options_read("Trains by the three engines of Mariana.", table, 2, argc, argv);
    if (failed) return failed == 1 ? 0 : failed;
    if (steps < 10) steps = 10;
    if (ranks < 1 || ranks > 8 || 8 % ranks != 0) return fprintf(stderr, "--ranks: 1, 2, 4 or 8\n"), 2;
    printf("%-20s %12s %11s %20s %9s\n", "", "loss: first", "last", "parameters of a rank", "KB a step");
    for (size_t i = 0; i < sizeof jobs / sizeof *jobs; i++) {
        job      *j = &jobs[i];
        char      text[64], error[500];
        hpml_plan plan = { 0 };
        j->steps   = steps;
        j->workers = (int32_t)ranks;
        snprintf(text, sizeof text, "%s=%d", j->plan, (int)ranks);
        if (hpml_plan_parse(text, &plan, error, sizeof error) != HPML_OK ||
            hpml_launch(&(hpml_launch_desc){ .ranks = j->workers + j->servers, .plan = &plan,
                                             .ctx = { .threads = 1, .seed = 1 } }, train, j, error,
                        sizeof error) != HPML_OK)
            return fprintf(stderr, "%s: %s\n", j->name, error), 1;
        printf("%-20s %12.3f %11.3f %20lld %9.1f\n", j->name, j->first, j->last, (long long)j->floats, j->kb);
    }
    return 0;
}
