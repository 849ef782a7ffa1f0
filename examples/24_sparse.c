/* What you learn: training a large sparse table by threads without locks, and by servers. Difficulty 2 of 4.
   cc -O2 examples/24_sparse.c -o sparse -lm -lpthread && ./sparse          (or ./sparse WORDS, 100 or more)
   Texts of 12 words out of 200,000, a few of which decide between two classes; a word's weights are a row of a table.
   A step touches the rows of its batch alone, so neither time nor messages grow with the table (.sparse):
     hogwild   threads read and write the rows that they need in values that all share, without locks
     async     servers have the rows; workers pull those of their batch and push what the gradient has of them
     sync      all ranks gather all ranks' rows
   prints for each:   strategy=async,servers=1   5 ranks: loss 0.030,     9163 bytes a step, 1.23 s   and, last, the
   4,800,000 bytes that a ring of 4 ranks would send of a dense table. */
#define HPML_IMPLEMENTATION
#include "../hpml_comm.h"
#include <stdio.h>
#include <stdlib.h>

enum { LENGTH = 12, WIDTH = 4, BATCH = 32, TEXTS = 16384, EPOCHS = 3 };

typedef struct run {
    const char *plan;
    int         words;
    double      loss, bytes, seconds; /* bytes: sent by rank 0 in a step */
} run;

/* Draws texts: common words are likelier, as in a language; every tenth word speaks for its class. */
static hpml_dataset *draw_texts(hpml_ctx *ctx, int words)
{
    const int64_t shape = LENGTH;
    int32_t      *x     = (int32_t *)malloc(sizeof *x * TEXTS * LENGTH);
    int32_t      *y     = (int32_t *)malloc(sizeof *y * TEXTS);
    hpml_rng      r     = { .seed = 4 };
    if (!x || !y) exit(1);
    for (int i = 0; i < TEXTS; i++) {
        int votes = 0;
        for (int k = 0; k < LENGTH; k++) {
            const double u = (double)hpml_rng_below(&r, 1 << 20) / (1 << 20);
            const int    w = (int)(u * u * u * words) % words;
            x[i * LENGTH + k] = w;
            if (w % 10 < 2) votes += w % 10 == 0 ? 1 : -1;
        }
        y[i] = votes > 0;
    }
    hpml_dataset *texts = hpml_dataset_create(ctx, TEXTS, HPML_DTYPE_I32, 1, &shape, x, HPML_DTYPE_I32, 1, y);
    free(x);
    free(y);
    return texts;
}

static hpml_status train(hpml_comm *c, void *user)
{
    run                *job  = (run *)user;
    hpml_ctx           *ctx  = hpml_comm_ctx(c);
    hpml_plan           plan = { 0 };
    hpml_counters       sent;
    hpml_metrics        m    = { 0 };
    hpml_embedding_desc table = { .name = "table", .sparse = true, .init = HPML_INIT_ZEROS };
    hpml_tensor        *x = hpml_input_tokens(ctx, BATCH, LENGTH);
    hpml_tensor        *h = hpml_sum(hpml_embedding(x, job->words, WIDTH, &table), 1); /* (BATCH, WIDTH) */
    hpml_trainer       *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = x, .output = hpml_linear(h, 2, NULL), .loss = HPML_LOSS_CROSS_ENTROPY, .lr = 0.3f });
    hpml_dataset       *texts = draw_texts(ctx, job->words);
    if (hpml_plan_parse(job->plan, &plan, NULL, 0) != HPML_OK) return HPML_ERR_ARGUMENT;
    hpml_distributed *d = hpml_distribute(t, c, &plan);
    hpml_comm_counters_reset(c);
    const double start = hpml_comm_now(c);
    hpml_status  status = hpml_trainer_fit(t, texts, &(hpml_fit_desc){ .epochs = EPOCHS });
    job->seconds = hpml_comm_now(c) - start;
    hpml_comm_counters(c, &sent);
    if (status == HPML_OK) status = hpml_distribute_finish(d);
    if (hpml_comm_rank(c) > 0 || status != HPML_OK) return status;
    status     = hpml_trainer_evaluate(t, texts, &m);
    job->loss  = m.loss;
    job->bytes = (double)sent.bytes / (double)hpml_trainer_step_count(t);
    return status;
}

int main(int count, char **word)
{
    static const struct { const char *plan; int ranks; } rows[] = {
        { "strategy=hogwild", 1 }, { "strategy=hogwild", 4 }, { "strategy=async,servers=1", 5 },
        { "strategy=ps,servers=2", 6 }, { "strategy=sync", 4 } };
    const int words = count > 1 ? atoi(word[1]) : 200000;
    if (words < 100) return fprintf(stderr, "usage: sparse [WORDS, 100 or more]\n"), 1;
    printf("a table of %d x %d floats, %d texts, %d epochs\n", words, WIDTH, TEXTS, EPOCHS);
    for (int i = 0; i < 5; i++) {
        char             error[400];
        run              job = { .plan = rows[i].plan, .words = words };
        hpml_launch_desc l   = { .ranks = rows[i].ranks, .ctx.threads = 1, .ctx.seed = 1 };
        if (hpml_launch(&l, train, &job, error, sizeof error) != HPML_OK) return fprintf(stderr, "%s\n", error), 1;
        printf("%-26s %d ranks: loss %.3f, %8.0f bytes a step, %.2f s\n", job.plan, rows[i].ranks, job.loss, job.bytes,
               job.seconds);
    }
    printf("a dense table in a ring of 4: %.0f bytes a step\n", 2 * 0.75 * 4 * WIDTH * words);
    return 0;
}
