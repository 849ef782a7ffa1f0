/* What you learn: a language model whose ranks share each sequence (ring attention) and own different experts.
   Difficulty 3 of 4.
   cc -O2 examples/22_experts.c -o experts -lm -lpthread && ./experts [--steps N]
   The text: eight made-up languages, one for each sequence, each with a rule of its own for the letter that follows a
   letter. One program, written once, trains by four plans:
     sequence  ranks have parts of every sequence; keys and values pass around a ring (hpml_ring_attention)
     expert    ranks have some experts each, and sequences of their own, whose letters travel (hpml_experts)
   prints, for each plan, the loss at first and at last (2.3, 0.15), the parameters of a rank, and what it sends. Losses
   of the plans agree but for rounding and the experts' capacity, which each rank counts for its own letters. */
#define HPML_IMPLEMENTATION
#include "../hpml_comm.h"
#include "options.h"

enum { LETTERS = 16, LANGUAGES = 8, T = 32, B = 16, C = 32, HEADS = 4, EXPERTS = 8, LAYERS = 2 };

typedef struct job {
    const char *plan;
    int64_t     steps;
    double      first, last;    /* loss of the first and of the last tenth of the steps */
    int64_t     floats;         /* parameters of rank 0 */
    double      kb[HPML_AXES];  /* sent by rank 0 in a step, over each axis; DATA: gradients */
} job;

/* x + attention, then x + experts. Everything is about this rank's time steps: x (B, T / p, C). */
static hpml_tensor *block(hpml_tensor *x, hpml_tensor **balance)
{
    const hpml_attention_desc heads   = { .heads = HEADS };
    const hpml_experts_desc   experts = { .experts = EXPERTS, .hidden = 2 * C, .capacity = 2 };
    hpml_tensor *one, *a = hpml_linear(hpml_layernorm(x, NULL), 3 * C, NULL);
    a = hpml_linear(hpml_ring_attention(a, &heads), C, NULL);
    x = hpml_add(x, a);
    a = hpml_experts(hpml_layernorm(x, NULL), &experts, &one);
    *balance = *balance ? hpml_add(*balance, one) : one; /* 1 for each layer if all experts are equally busy */
    return hpml_add(x, a);
}

/* Sequence number i: letters of language i % LANGUAGES; y is x, one letter later. */
static void write_sequence(uint64_t seed, int64_t i, int32_t *x, int32_t *y)
{
    hpml_rng rng      = { .seed = seed, .stream = (uint64_t)i };
    int      language = (int)(hpml_rng_u32(&rng) % LANGUAGES), letter = (int)(hpml_rng_u32(&rng) % LETTERS);
    for (int t = 0; t < T; t++) {
        x[t]   = letter;
        letter = (int)hpml_permute_index(99, (uint64_t)language, LETTERS, letter); /* the language's rule */
        y[t]   = letter;
    }
}

/* Returns KB that this rank has sent over communicator c since the last call; NULL: an axis of one rank. */
static double kb_sent(hpml_comm *c)
{
    hpml_counters n = { 0 };
    if (!c) return 0;
    hpml_comm_counters(c, &n);
    hpml_comm_counters_reset(c);
    return (double)n.bytes / 1e3;
}

static hpml_tensor *record(hpml_ctx *ctx, hpml_tensor *tokens, hpml_tensor *labels, hpml_tensor **loss)
{
    const hpml_param_desc position = { .ndim = 2, .shape = { T, C }, .name = "position", .init = HPML_INIT_NORMAL };
    const hpml_embedding_desc letters = { .init = HPML_INIT_NORMAL, .init_scale = 0.1f };
    hpml_tensor *balance = NULL, *x = hpml_embedding(tokens, LETTERS, C, &letters);
    x = hpml_add(x, hpml_param_create(ctx, &position));     /* (B, T, C) */
    x = hpml_group_split(x, HPML_AXIS_SEQUENCE, 1);         /* (B, T / p, C): this rank's time steps */
    for (int i = 0; i < LAYERS; i++) x = block(x, &balance);
    x = hpml_group_gather(x, HPML_AXIS_SEQUENCE, 1);        /* (B, T, C) again */
    hpml_tensor *logits = hpml_linear(hpml_layernorm(x, NULL), LETTERS, NULL);
    *loss = hpml_add(hpml_cross_entropy(logits, labels, NULL), hpml_scale(balance, 0.01f, -0.01f * LAYERS));
    return logits;
}

static hpml_status train(hpml_comm *c, void *user)
{
    job             *j   = (job *)user;
    hpml_ctx        *ctx = hpml_comm_ctx(c);
    const hpml_mesh *m   = hpml_comm_mesh(c);
    const int        own = m ? m->size[HPML_AXIS_EXPERT] : 1, at = m ? m->at[HPML_AXIS_EXPERT] : 0;
    const int64_t    rows = B / own;                        /* sequences of this rank in a step */
    hpml_tensor  *tokens = hpml_input_tokens(ctx, rows, T), *labels = hpml_input_tokens(ctx, rows, T), *loss = NULL;
    hpml_tensor  *logits = record(ctx, tokens, labels, &loss);
    hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = tokens, .output = logits, .target = labels, .loss_tensor = loss, .optimizer = HPML_OPT_ADAM,
        .lr = 0.003f });
    if (!hpml_distribute(t, c, NULL)) return hpml_ctx_status(ctx); /* by the plan of the launch */
    const int64_t tenth = j->steps / 10;
    double        first = 0, last = 0;
    for (int64_t s = 0; s < j->steps && hpml_ctx_status(ctx) == HPML_OK; s++) {
        int32_t        x[B * T], y[B * T];
        hpml_step_info info = { 0 };
        for (int64_t i = 0; i < rows; i++) write_sequence(1, s * B + at * rows + i, x + i * T, y + i * T);
        hpml_trainer_step(t, x, y, rows, &info);
        hpml_allreduce(c, &info.loss, 1, &(hpml_allreduce_desc){ .reduce = HPML_MEAN }); /* of each rank's sequences */
        if (s < tenth) first += (double)info.loss / (double)tenth;
        if (s >= j->steps - tenth) last += (double)info.loss / (double)tenth;
    }
    if (hpml_comm_rank(c) > 0) return hpml_ctx_status(ctx);
    j->first  = first;
    j->last   = last;
    j->floats = hpml_param_total(ctx);
    for (int k = 0; m && k < HPML_AXES; k++)
        j->kb[k] = kb_sent(k == HPML_AXIS_DATA ? m->replicas : m->axis[k]) / (double)j->steps;
    return hpml_ctx_status(ctx);
}

int main(int argc, char **argv)
{
    static const struct { const char *plan; int ranks; } rows[] = {
        { "", 1 }, { "sequence=2", 2 }, { "expert=2", 2 }, { "sequence=2,expert=2", 4 } };
    int64_t      steps = 200;
    const option table[] = { { "--steps", OPTION_COUNT, &steps, "N", "steps of training (200)" } };
    int          failed = options_read("Trains one model of experts and ring attention by four plans.", table, 1, argc,
                                       argv);
    if (failed) return failed == 1 ? 0 : failed;
    if (steps < 10) steps = 10;
    printf("%-20s %13s %11s %29s\n", "", "loss", "parameters", "KB that rank 0 sends a step");
    printf("%-20s %6s %6s %11s %9s %9s %9s\n", "plan", "first", "last", "of a rank", "sequence", "experts",
           "gradients");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        job       j = { .plan = rows[i].plan, .steps = steps };
        hpml_plan plan = { 0 };
        char      error[500];
        if (hpml_plan_parse(j.plan, &plan, error, sizeof error) != HPML_OK ||
            hpml_launch(&(hpml_launch_desc){ .ranks = rows[i].ranks, .plan = &plan,
                                             .ctx = { .threads = 1, .seed = 1 } }, train, &j, error,
                        sizeof error) != HPML_OK)
            return fprintf(stderr, "%s: %s\n", j.plan, error), 1;
        printf("%-20s %6.3f %6.3f %11lld %9.1f %9.1f %9.1f\n", *j.plan ? j.plan : "one rank", j.first, j.last,
               (long long)j.floats, j.kb[HPML_AXIS_SEQUENCE], j.kb[HPML_AXIS_EXPERT], j.kb[HPML_AXIS_DATA]);
    }
    return 0;
}
