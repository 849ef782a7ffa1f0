/* What you learn: a GPT whose layers are divided over ranks (Shoeybi et al. 2019, "Megatron-LM"). Difficulty 3 of 4.
   cc -O2 examples/15_tensor_parallel.c -o tensor -lm -lpthread && ./tensor              (./tensor --help: options)
   HPML_PLAN=tensor=4 ./tensor    HPML_RUN=clock:8 HPML_PLAN=data=2,tensor=4 ./tensor    with MPI: 05_allreduce.c
   Heads of attention and columns of the dense layers are split: each rank of the axis `tensor` has some of them. The
   first dense layer of a pair has some outputs on each rank, the second some inputs, so that one sum over the ranks
   ends the pair: two sums forward and two backward a block, however large the layers are. Nothing in the model says how
   many ranks there are.
   prints, for one rank and for all: losses, and numbers that each rank has; the sums of a step and their bytes. */
#define HPML_IMPLEMENTATION
#include "../hpml_comm.h"
#include "options.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { LETTERS = 256, MOST = 64 };

typedef struct job {
    int64_t     steps, batch, context, width, layers, heads;
    int         json;
    const char *run, *text;
    double      first_loss, loss, seconds;  /* of all samples; seconds of a step */
    int64_t     parameters[MOST];           /* numbers that each rank has */
    int         data[MOST], tensor[MOST];   /* each rank's places */
    int         ranks, size[HPML_AXES];
    int64_t     sums;                       /* of a step, over the ranks of axis tensor */
    double      bytes, split_bytes;         /* that rank 0 has sent in a step; of these, by split layers */
} job;

/* x + f(norm(x)), twice. Sizes are those of the whole layers. */
static hpml_tensor *block(hpml_tensor *x, const job *j) /* (B, T, C) */
{
    hpml_linear_desc    qkv   = { .split = HPML_SPLIT_OUT, .sections = 3 };
    hpml_linear_desc    wide  = { .split = HPML_SPLIT_OUT, .activation = HPML_ACT_GELU };
    hpml_linear_desc    join  = { .split = HPML_SPLIT_IN };
    hpml_attention_desc heads = { .heads = (int32_t)j->heads };
    hpml_tensor *a = hpml_attention(hpml_linear(hpml_layernorm(x, NULL), 3 * j->width, &qkv), &heads); /* some heads */
    x = hpml_add(x, hpml_linear(a, j->width, &join));                                                  /* a sum */
    a = hpml_linear(hpml_layernorm(x, NULL), 4 * j->width, &wide);                                  /* some columns */
    return hpml_add(x, hpml_linear(a, j->width, &join));                                               /* a sum */
}

/* (B, T) -> (B, T, letters): the table and the scores are split by letters. */
static hpml_tensor *gpt(hpml_tensor *tokens, const job *j)
{
    hpml_embedding_desc table = { .split = HPML_SPLIT_OUT, .init = HPML_INIT_NORMAL, .init_scale = 0.02f };
    hpml_param_desc     place = { .ndim = 2, .shape = { j->context, j->width }, .name = "place",
                                  .init = HPML_INIT_NORMAL, .init_scale = 0.02f };
    hpml_linear_desc    head  = { .split = HPML_SPLIT_OUT, .no_bias = true };
    hpml_tensor        *x     = hpml_embedding(tokens, LETTERS, j->width, &table);
    x = hpml_add(x, hpml_param_create(tokens->ctx, &place));
    for (int64_t i = 0; i < j->layers; i++) x = block(x, j);
    return hpml_linear(hpml_layernorm(x, NULL), LETTERS, &head);
}

/* Rank 0 notes each rank's places, and how many numbers each rank has. */
static void note(job *j, const hpml_mesh *m)
{
    int64_t mine[3] = { hpml_param_total(hpml_comm_ctx(m->all)), m->at[HPML_AXIS_DATA], m->at[HPML_AXIS_TENSOR] };
    int64_t all[3 * MOST];
    hpml_gather(m->all, mine, sizeof mine, all, 0);
    for (int r = 0; r < j->ranks && hpml_comm_rank(m->all) == 0; r++) {
        j->parameters[r] = all[3 * r];
        j->data[r]       = (int)all[3 * r + 1];
        j->tensor[r]     = (int)all[3 * r + 2];
    }
}

static hpml_status train(hpml_comm *c, void *user)
{
    job              copy = *(const job *)user, *j = &copy; /* each rank has a copy of its own */
    hpml_ctx        *ctx  = hpml_comm_ctx(c);
    const hpml_mesh *m    = hpml_comm_mesh(c);
    int              data = m->size[HPML_AXIS_DATA], tensor = m->size[HPML_AXIS_TENSOR];
    j->ranks = hpml_comm_size(c);
    if (j->ranks > MOST) return hpml_ctx_fail(ctx, HPML_ERR_ARGUMENT, "at most %d ranks, not %d", MOST, j->ranks);
    hpml_tensor      *tokens = hpml_input_tokens(ctx, (j->batch - 1) / data + 1, j->context); /* (B, T) */
    hpml_trainer     *t      = hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = tokens, .output = gpt(tokens, j), .optimizer = HPML_OPT_ADAM, .lr = 0.003f });
    hpml_dataset     *text = hpml_dataset_load_text(ctx, &j->text, 1, j->context, true);
    hpml_distributed *d    = hpml_distribute(t, c, NULL); /* as launched */
    hpml_counters     before = { 0 }, after = { 0 };
    hpml_distribute_report r = { 0 };
    if (!d) return hpml_ctx_status(ctx);
    note(j, m);
    if (tensor > 1) hpml_comm_counters(m->axis[HPML_AXIS_TENSOR], &before);
    for (int64_t i = 0; i < j->steps && hpml_ctx_status(ctx) == HPML_OK; i++) {
        hpml_trainer_fit(t, text, &(hpml_fit_desc){ .epochs = 1000000, .max_steps = 1 });
        hpml_distribute_get(d, &r, false);
        if (i == 0) j->first_loss = r.loss;
    }
    if (tensor > 1) hpml_comm_counters(m->axis[HPML_AXIS_TENSOR], &after);
    if (tensor > 1 && j->steps > 0) j->sums = (after.rounds - before.rounds) / (2 * (tensor - 1)) / j->steps;
    memcpy(j->size, m->size, sizeof j->size);
    j->loss        = r.loss;
    j->seconds     = r.step_s;
    j->bytes       = r.bytes;
    j->split_bytes = r.split_bytes;
    if (hpml_comm_rank(c) == 0) *(job *)user = *j;
    return hpml_ctx_status(ctx);
}

/* Trains on the ranks that `run` names, by the plan or HPML_PLAN; false: an error, which is printed. A ring of p ranks
   adds up in 2 (p - 1) rounds, so that counting rounds counts sums. */
static bool start(job *j, const char *run, int tensor)
{
    char             error[768];
    hpml_plan        plan = { .tensor = tensor, .global_batch = j->batch, .algorithm = HPML_RING };
    hpml_launch_desc d    = { .run = run, .plan = &plan, .alone = true };
    if (hpml_launch(&d, train, j, error, sizeof error) == HPML_OK) return true;
    fprintf(stderr, "%s\n", error);
    return false;
}

static void print(const job *one, const job *all)
{
    int    p = all->size[HPML_AXIS_TENSOR];
    double bytes = 4.0 * (double)(all->batch / all->size[HPML_AXIS_DATA] * all->context * all->width); /* (B, T, C) */
    printf("one rank: loss %.6f, after %lld steps %.6f; %lld numbers\n", one->first_loss, (long long)one->steps,
           one->loss, (long long)one->parameters[0]);
    printf("%d ranks:  loss %.6f, after %lld steps %.6f; a step of %.1f ms\n", all->ranks, all->first_loss,
           (long long)all->steps, all->loss, 1e3 * all->seconds);
    for (int r = 0; r < all->ranks; r++)
        printf("  rank %d, data %d, tensor %d: %lld of %lld heads, %lld numbers\n", r, all->data[r], all->tensor[r],
               (long long)all->heads / p, (long long)all->heads, (long long)all->parameters[r]);
    if (p == 1) return;
    printf("a step: %lld sums, 4 in each of %lld blocks, the others for table and loss\n", (long long)all->sums,
           (long long)all->layers);
    printf("a rank sends %.0f bytes in them (blocks: %.0f), %.0f for gradients\n", all->split_bytes,
           4 * (double)all->layers * 2 * bytes * (p - 1) / p, all->bytes - all->split_bytes);
}

int main(int argc, char **argv)
{
    job one = { .steps = 20, .batch = 8, .context = 32, .width = 64, .layers = 2, .heads = 8, .run = "threads:4",
                .text = "README.md" };
    const option table[] = {
        { "--steps", OPTION_COUNT, &one.steps, "N", "steps of training (20)" },
        { "--batch", OPTION_COUNT, &one.batch, "N", "windows of text in a step, on all ranks (8)" },
        { "--context", OPTION_COUNT, &one.context, "N", "characters in a window (32)" },
        { "--width", OPTION_COUNT, &one.width, "N", "numbers for each character (64)" },
        { "--layers", OPTION_COUNT, &one.layers, "N", "transformer blocks (2)" },
        { "--heads", OPTION_COUNT, &one.heads, "N", "attention heads (8)" },
        { "--run", OPTION_TEXT, &one.run, "WHERE", "threads:4, clock:8, mpi, ... (threads:4)" },
        { "--text", OPTION_TEXT, &one.text, "FILE", "the text to learn (README.md)" },
        { "--json", OPTION_FLAG, &one.json, NULL, "a JSON object instead" } };
    int failed = options_read("A GPT whose layers are divided over ranks; HPML_PLAN says how (tensor=2).", table,
                              sizeof table / sizeof *table, argc, argv);
    int rank = 0;
    if (failed) return failed == 1 ? 0 : failed;
    job all = one;
    hpml_launched(&rank);
    if (!start(&all, one.run, 2)) return 1;
    if (rank > 0) return 0;
    unsetenv("HPML_PLAN"); /* and once more on one rank */
    unsetenv("HPML_RUN");
    if (!start(&one, "serial", 1)) return 1;
    if (one.json)
        printf("{\"ranks\": %d, \"tensor\": %d, \"loss\": %.9g, \"serial_loss\": %.9g, \"sums\": %lld, "
               "\"split_bytes\": %.0f, \"bytes\": %.0f, \"parameters\": %lld, \"step_seconds\": %.6f}\n",
               all.ranks, all.size[HPML_AXIS_TENSOR], all.loss, one.loss, (long long)all.sums, all.split_bytes,
               all.bytes, (long long)all.parameters[0], all.seconds);
    else print(&one, &all);
    return fabs(all.loss - one.loss) > 1e-4;
}
