/* What you learn: training a model that does not fit into the memory of a rank (Rajbhandari et al. 2020, "ZeRO").
   Difficulty 3 of 4.
   cc -O2 examples/19_large_model.c -o large -lm -lpthread && ./large                     (./large --help: options)
   HPML_PLAN=shard=1 ./large    HPML_PLAN=shard=3,bucket_bytes=1 ./large    HPML_PLAN=tensor=2,shard=3 ./large
   HPML_PLAN=pipe=2,schedule=1f1b ./large --run clock:64 --width 1024 --measure     what 64 ranks would need
   Each rank gets an allocator that gives at most --memory bytes. One rank cannot train the GPT with so few. Four ranks
   can: each computes a quarter of the batch, and keeps a quarter of the parameters, of their gradients and of the
   optimizer's states (shard=3); whole values and gradients exist for a few layers at a time. The plan alone says
   so, not the model.
   prints that one rank lacks memory, then for one rank with all memory and for the four: the loss, the bytes of a rank,
   seconds and bytes of a step. */
#define HPML_IMPLEMENTATION
#include "../hpml_comm.h"
#include "options.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { LETTERS = 256, MOST = 64 };

/* Memory of a rank: how much the context may have, has and has had. */
typedef struct budget { size_t most, now, peak; } budget;

typedef struct job {
    int64_t     steps, batch, context, width, layers, heads, memory;
    int         json, measure, ranks;
    const char *run, *text;
    budget      of[MOST];      /* by rank */
    hpml_memory planned[MOST]; /* of rank 0 or, with --measure, of each rank */
    double      loss, seconds, bytes; /* of the last step; of a step: seconds, bytes that rank 0 sends */
    char        plan[256], error[768]; /* plan: in words */
} job;

/* An allocator like the library's own, but with a limit. Several threads of a rank may call it. */
static void *budget_alloc(size_t size, size_t align, void *user)
{
    budget *b   = (budget *)user;
    size_t  now = __atomic_add_fetch(&b->now, size, __ATOMIC_RELAXED);
    void   *p   = NULL;
    if (b->most == 0 || now <= b->most) p = aligned_alloc(align, (size + align - 1) / align * align);
    if (!p) __atomic_sub_fetch(&b->now, size, __ATOMIC_RELAXED);
    else if (now > b->peak) b->peak = now;
    return p;
}

static void budget_free(void *p, size_t size, void *user)
{
    __atomic_sub_fetch(&((budget *)user)->now, size, __ATOMIC_RELAXED);
    free(p);
}

/* Gives rank `rank` its allocator, before its context is created. */
static void place(hpml_ctx_desc *ctx, int rank, void *user)
{
    job *j = (job *)user;
    if (rank >= MOST) return;
    j->of[rank].most     = (size_t)j->memory;
    ctx->allocator.alloc = budget_alloc;
    ctx->allocator.free  = budget_free;
    ctx->allocator.user  = &j->of[rank];
}

/* x + f(norm(x)), twice: attention, then two dense layers. */
static hpml_tensor *block(hpml_tensor *x, const job *j) /* (B, T, C) */
{
    hpml_linear_desc    qkv   = { .split = HPML_SPLIT_OUT, .sections = 3 };
    hpml_linear_desc    wide  = { .split = HPML_SPLIT_OUT, .activation = HPML_ACT_GELU };
    hpml_linear_desc    join  = { .split = HPML_SPLIT_IN };
    hpml_attention_desc heads = { .heads = (int32_t)j->heads };
    hpml_tensor *a = hpml_attention(hpml_linear(hpml_layernorm(x, NULL), 3 * j->width, &qkv), &heads);
    x = hpml_add(x, hpml_linear(a, j->width, &join));
    a = hpml_linear(hpml_layernorm(x, NULL), 4 * j->width, &wide);
    return hpml_add(x, hpml_linear(a, j->width, &join));
}

/* (B, T) -> (B, T, letters) */
static hpml_tensor *gpt(hpml_tensor *tokens, const job *j)
{
    hpml_embedding_desc table = { .init = HPML_INIT_NORMAL, .init_scale = 0.02f };
    hpml_param_desc     where = { .ndim = 2, .shape = { j->context, j->width }, .name = "place",
                                  .init = HPML_INIT_NORMAL, .init_scale = 0.02f };
    hpml_linear_desc    head  = { .init = HPML_INIT_NORMAL, .init_scale = 0.02f, .no_bias = true };
    hpml_tensor        *x     = hpml_embedding(tokens, LETTERS, j->width, &table);
    x = hpml_add(x, hpml_param_create(tokens->ctx, &where));
    for (int64_t i = 0; i < j->layers; i++) x = block(x, j);
    return hpml_linear(hpml_layernorm(x, NULL), LETTERS, &head);
}

static hpml_status train(hpml_comm *c, void *user)
{
    job               *j   = (job *)user;
    hpml_ctx          *ctx = hpml_comm_ctx(c);
    const hpml_mesh   *m   = hpml_comm_mesh(c);
    hpml_distribute_report r = { 0 };
    if (hpml_comm_size(c) > MOST) return hpml_ctx_fail(ctx, HPML_ERR_ARGUMENT, "at most %d ranks", MOST);
    hpml_tensor  *tokens = hpml_input_tokens(ctx, (j->batch - 1) / m->size[HPML_AXIS_DATA] + 1, j->context);
    hpml_trainer *t      = hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = tokens, .output = gpt(tokens, j), .optimizer = HPML_OPT_ADAMW, .lr = 0.001f, .weight_decay = 0.01f });
    if (j->measure) return hpml_distribute_memory(t, c, NULL, &j->planned[hpml_comm_rank(c)]);
    hpml_dataset     *text = hpml_dataset_load_text(ctx, &j->text, 1, j->context, true);
    hpml_distributed *d    = hpml_distribute(t, c, NULL); /* as launched */
    if (!d) return hpml_ctx_status(ctx);
    for (int64_t i = 0; i < j->steps && hpml_ctx_status(ctx) == HPML_OK; i++)
        hpml_trainer_fit(t, text, &(hpml_fit_desc){ .epochs = 1000000, .max_steps = 1 });
    hpml_distribute_get(d, &r, false);
    if (hpml_comm_rank(c) > 0) return hpml_ctx_status(ctx);
    hpml_graph_memory(hpml_trainer_graph(t), &j->planned[0]);
    j->ranks   = hpml_comm_size(c);
    j->loss    = r.loss;
    j->seconds = r.step_s;
    j->bytes   = r.bytes;
    return hpml_ctx_status(ctx);
}

/* Trains where `run` says, by the plan or HPML_PLAN, with at most `memory` bytes a rank (0: any number). */
static bool start(job *j, const char *run, int shard, int64_t memory)
{
    hpml_plan        plan = { .shard = shard, .global_batch = j->batch };
    hpml_launch_desc d    = { .run = run, .plan = &plan, .place = place, .alone = true };
    const char      *more = getenv("HPML_PLAN");
    if (more && hpml_plan_parse(more, &plan, j->error, sizeof j->error) != HPML_OK) return false;
    hpml_plan_text(&plan, false, j->plan, sizeof j->plan);
    j->memory = memory;
    memset(j->of, 0, sizeof j->of);
    return hpml_launch(&d, train, j, j->error, sizeof j->error) == HPML_OK;
}

static double mib(size_t bytes) { return (double)bytes / (1 << 20); }

/* The most that a rank has had. */
static size_t peak(const job *j)
{
    size_t most = 0;
    for (int r = 0; r < MOST; r++) most = j->of[r].peak > most ? j->of[r].peak : most;
    return most;
}

static void print_memory(const hpml_memory *m)
{
    printf("  values %.2f, gradients %.2f, states %.2f, activations %.2f MiB\n", mib(m->parameters),
           mib(m->gradients), mib(m->optimizer), mib(m->activations + m->scratch));
}

static void print(const char *who, const job *j)
{
    printf("%s: loss %.6f after %lld steps, at most %.2f MiB a rank\n", who, j->loss, (long long)j->steps,
           mib(peak(j)));
    print_memory(&j->planned[0]);
    printf("  a step of %.1f ms, %.2f MiB sent\n", 1e3 * j->seconds, j->bytes / (1 << 20));
}

/* Says what each rank would need by the plan; none of it is taken. */
static int measure(job *j)
{
    if (!start(j, j->run, 3, 0)) return fprintf(stderr, "%s\n", j->error), 1;
    printf("plan %s\n", j->plan);
    for (int r = 0; r < MOST; r++) {
        if (j->planned[r].total == 0) continue;
        printf("rank %d: %.2f MiB\n", r, mib(j->planned[r].total));
        print_memory(&j->planned[r]);
    }
    return 0;
}

int main(int argc, char **argv)
{
    job one = { .steps = 10, .batch = 8, .context = 32, .width = 128, .layers = 4, .heads = 4, .memory = 16000000,
                .run = "threads:4", .text = "README.md" };
    const option table[] = {
        { "--steps", OPTION_COUNT, &one.steps, "N", "steps of training (10)" },
        { "--batch", OPTION_COUNT, &one.batch, "N", "windows of text in a step, on all ranks (8)" },
        { "--context", OPTION_COUNT, &one.context, "N", "characters in a window (32)" },
        { "--width", OPTION_COUNT, &one.width, "N", "numbers for each character (128)" },
        { "--layers", OPTION_COUNT, &one.layers, "N", "transformer blocks (4)" },
        { "--heads", OPTION_COUNT, &one.heads, "N", "attention heads (4)" },
        { "--memory", OPTION_COUNT, &one.memory, "N", "bytes of a rank (16000000)" },
        { "--run", OPTION_TEXT, &one.run, "WHERE", "threads:4, clock:8, mpi, ... (threads:4)" },
        { "--text", OPTION_TEXT, &one.text, "FILE", "the text to learn (README.md)" },
        { "--measure", OPTION_FLAG, &one.measure, NULL, "says what each rank would need, and trains nothing" },
        { "--json", OPTION_FLAG, &one.json, NULL, "a JSON object instead" } };
    int failed = options_read("A GPT too large for one rank; HPML_PLAN says how it is spread (shard=3).", table,
                              sizeof table / sizeof *table, argc, argv);
    int rank = 0;
    if (failed) return failed == 1 ? 0 : failed;
    if (one.measure) return measure(&one);
    job         all = one, small = one;
    hpml_launched(&rank);
    if (!start(&all, one.run, 3, one.memory)) return fprintf(stderr, "%s\n", all.error), 1;
    if (rank > 0) return 0;
    unsetenv("HPML_PLAN"); /* and once more on one rank: with as few bytes, then with as many as the model needs */
    unsetenv("HPML_RUN");
    bool fits = start(&small, "serial", 0, one.memory);
    if (!start(&one, "serial", 0, 0)) return fprintf(stderr, "%s\n", one.error), 1;
    if (all.json) {
        printf("{\"plan\": \"%s\", \"ranks\": %d, \"loss\": %.9g, \"serial_loss\": %.9g, \"peak_bytes\": %zu, "
               "\"serial_peak_bytes\": %zu, \"step_seconds\": %.6f, \"bytes_sent\": %.0f}\n", all.plan, all.ranks,
               all.loss, one.loss, peak(&all), peak(&one), all.seconds, all.bytes);
    } else {
        printf("one rank with %.2f MiB: %.13s\n", mib((size_t)small.memory), fits ? "trains" : small.error);
        print("one rank with all memory", &one);
        printf("%d ranks with %.2f MiB each, plan %s\n", all.ranks, mib((size_t)all.memory), all.plan);
        print("together", &all);
    }
    return fabs(all.loss - one.loss) > 1e-4;
}
