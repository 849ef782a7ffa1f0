/* What you learn: generating text token by token with a cache of keys and values. Difficulty 3 of 4.
   cc -O2 examples/31_generate.c -o generate -lm -lpthread && ./generate [options] [text files; default: hpml's headers]
   A small model of the Llama family (rotary positions, grouped queries, RMS norms, a gated network), with the names of
   the published ones, learns characters and is saved. A second context reads the file and generates: its graph computes
   one token, and attention reads the earlier ones from the cache, so a token at position 500 takes little longer than
   the first. prints the loss, text, the microseconds for a token at early and late positions, those of a pass over the
   whole text, and by how much the scores of both ways differ (about 1e-6). */
#define HPML_IMPLEMENTATION
#include "../hpml.h"
#include "options.h"
#include "screen.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

typedef struct options {
    int64_t      steps, batch, context, width, layers, heads, kv_heads, length, seed, threads;
    const char  *file;
    option_words files;
} options;

/* What a graph that generates has and a graph that trains has not. */
typedef struct generator {
    hpml_tensor *position; /* I32 (1): the number of tokens in the caches */
    hpml_tensor *tokens, *scores;
    hpml_graph  *graph;
} generator;

/* A linear layer without bias, called model.layers.<layer>.<name>. */
static hpml_tensor *linear(hpml_tensor *x, int64_t out, int64_t layer, const char *name)
{
    char             full[64];
    hpml_linear_desc d = { .name = full, .no_bias = true, .init = HPML_INIT_NORMAL, .init_scale = 0.02f };
    snprintf(full, sizeof full, "model.layers.%lld.%s", (long long)layer, name);
    return hpml_linear(x, out, &d);
}

static hpml_tensor *norm(hpml_tensor *x, int64_t layer, const char *name)
{
    char full[64];
    snprintf(full, sizeof full, "model.layers.%lld.%s", (long long)layer, name);
    return hpml_rmsnorm(x, &(hpml_norm_desc){ .name = full });
}

/* x + f(norm(x)), twice; g NULL: no cache. (B, T, C) */
static hpml_tensor *block(hpml_tensor *x, const options *o, int64_t layer, const generator *g)
{
    int32_t             heads = (int32_t)o->heads, kv = (int32_t)o->kv_heads;
    int64_t             kv_width = o->width / heads * kv;
    hpml_rotary_desc    turn = { .heads = heads + 2 * kv, .rotated = heads + kv, .position = g ? g->position : NULL };
    hpml_attention_desc a = { .heads = heads, .kv_heads = kv, .position = g ? g->position : NULL };
    if (g) a.cache = hpml_tensor_create_3d(x->ctx, 1, o->length, 2 * kv_width);
    hpml_tensor *h = norm(x, layer, "input_layernorm"), *q = linear(h, o->width, layer, "self_attn.q_proj");
    hpml_tensor *k = linear(h, kv_width, layer, "self_attn.k_proj");
    hpml_tensor *v = linear(h, kv_width, layer, "self_attn.v_proj");
    hpml_tensor *qkv = hpml_rotary(hpml_concat((hpml_tensor *[]){ q, k, v }, 3, 2), &turn);
    x = hpml_add(x, linear(hpml_attention(qkv, &a), o->width, layer, "self_attn.o_proj"));
    h = norm(x, layer, "post_attention_layernorm");
    hpml_tensor *gate = hpml_silu(linear(h, 3 * o->width, layer, "mlp.gate_proj"));
    h = hpml_mul(gate, linear(h, 3 * o->width, layer, "mlp.up_proj"));
    return hpml_add(x, linear(h, o->width, layer, "mlp.down_proj"));
}

/* (B, T) -> (B, T, V) */
static hpml_tensor *record_model(hpml_tensor *tokens, int V, const options *o, const generator *g)
{
    hpml_embedding_desc table = { .name = "model.embed_tokens", .init = HPML_INIT_NORMAL, .init_scale = 0.02f };
    hpml_linear_desc    head = { .name = "lm_head", .no_bias = true, .init = HPML_INIT_NORMAL, .init_scale = 0.02f };
    hpml_tensor        *x = hpml_embedding(tokens, V, o->width, &table);
    for (int64_t i = 0; i < o->layers; i++) x = block(x, o, i, g);
    return hpml_linear(hpml_rmsnorm(x, &(hpml_norm_desc){ .name = "model.norm" }), V, &head);
}

static int progress(const hpml_step_info *i, void *user)
{
    double *smooth = (double *)user;
    *smooth = i->step == 1 ? (double)i->loss : 0.95 * *smooth + 0.05 * (double)i->loss;
    if (i->step % 100 == 0) printf("step %lld  loss %.3f  %.0f s\n", (long long)i->step, *smooth, i->seconds);
    fflush(stdout);
    return 0;
}

/* Trains on windows of `context` characters and saves the parameters. */
static int train(const options *o, hpml_ctx *ctx, hpml_dataset *text, int V)
{
    hpml_tensor      *tokens = hpml_input_tokens(ctx, o->batch, o->context);
    double            smooth = 0;
    hpml_loader_desc  loader = { .samples_per_epoch = o->steps * o->batch };
    hpml_fit_desc     fit = { .on_step = progress, .user = &smooth, .loader = &loader };
    hpml_trainer_desc desc = { .input = tokens, .output = record_model(tokens, V, o, NULL),
                               .optimizer = HPML_OPT_ADAMW, .lr = 0.002f, .beta2 = 0.99f, .clip_norm = 1,
                               .schedule = { .kind = HPML_SCHEDULE_COSINE, .total_steps = o->steps } };
    hpml_trainer     *t = hpml_trainer_create(ctx, &desc);
    printf("%lld parameters\n", (long long)hpml_param_total(ctx));
    if (o->steps > 0 && hpml_trainer_fit(t, text, &fit) != HPML_OK) return 1;
    return hpml_params_save(ctx, o->file, HPML_DTYPE_F32) != HPML_OK;
}

/* Computes the scores of the token after `token`, which is number `at` of the text. */
static const float *next_scores(generator *g, int32_t token, int32_t at)
{
    hpml_tensor_set_raw(g->tokens, &token, sizeof token);
    hpml_tensor_set_raw(g->position, &at, sizeof at);
    return hpml_graph_forward(g->graph, false, 0) == HPML_OK ? g->scores->data : NULL;
}

static int draw(hpml_rng *rng, const float *scores, int V)
{
    double most = -1e30, sum = 0, pick;
    int    c = 0;
    for (int i = 0; i < V; i++) most = fmax(most, (double)scores[i]);
    for (int i = 0; i < V; i++) sum += exp(((double)scores[i] - most) / 0.8);
    pick = (double)hpml_rng_uniform(rng) * sum;
    while (c < V - 1 && (pick -= exp(((double)scores[c] - most) / 0.8)) > 0) c++;
    return c;
}

/* The largest difference between `scores` (length, V), token by token, and those of one pass over the whole text. */
static int compare(hpml_ctx *ctx, const options *o, const int32_t *text, const float *scores, int V)
{
    hpml_tensor *tokens = hpml_input_tokens(ctx, 1, o->length), *y = record_model(tokens, V, o, NULL);
    hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &y, .output_count = 1, .predict = true });
    double       worst = 0, start;
    if (hpml_graph_alloc(g) != HPML_OK || hpml_params_load(ctx, o->file) != HPML_OK) return 1;
    hpml_tensor_set_raw(tokens, text, (size_t)o->length * sizeof *text);
    if (hpml_graph_forward(g, false, 0) != HPML_OK) return 1;
    start = hpml_now();
    if (hpml_graph_forward(g, false, 0) != HPML_OK) return 1;
    start = hpml_now() - start;
    for (int64_t i = 0; i < o->length * V; i++) worst = fmax(worst, fabs((double)y->data[i] - (double)scores[i]));
    printf("a pass over the whole text: %.0f microseconds; scores differ by %.1e at most\n", 1e6 * start, worst);
    return worst > 1e-4;
}

/* Generates `length` characters from the saved parameters, the first of which is `first`. */
static int generate(hpml_ctx *ctx, const options *o, const unsigned char *vocabulary, int V, int32_t *text,
                    float *scores)
{
    generator g = { .position = hpml_input(ctx, HPML_DTYPE_I32, 1, (int64_t[]){ 1 }) };
    hpml_rng  rng = { .seed = (uint64_t)o->seed, .stream = 99 };
    double    seconds[2] = { 0, 0 };
    int64_t   part = o->length / 4, column = 0;
    g.tokens = hpml_input_tokens(ctx, 1, 1);
    g.scores = record_model(g.tokens, V, o, &g);
    g.graph  = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &g.scores, .output_count = 1, .predict = true });
    if (hpml_graph_alloc(g.graph) != HPML_OK || hpml_params_load(ctx, o->file) != HPML_OK) return 1;
    printf("\n");
    for (int64_t i = 0; i < o->length; i++) {
        double       start = hpml_now();
        const float *s = next_scores(&g, text[i], (int32_t)i);
        if (!s) return 1;
        start = hpml_now() - start;
        if (i < part) seconds[0] += start;
        if (i >= o->length - part) seconds[1] += start;
        memcpy(scores + i * V, s, (size_t)V * sizeof *s);
        text[i + 1] = draw(&rng, s, V);
        column = vocabulary[text[i]] == '\n' ? 0 : column + 1;
        if (column >= screen_columns()) column = 1, putchar('\n');
        putchar(vocabulary[text[i]]);
    }
    printf("\n\na token takes %.0f microseconds in the first quarter, %.0f in the last\n",
           1e6 * seconds[0] / (double)part, 1e6 * seconds[1] / (double)part);
    return 0;
}

static int run(const options *o)
{
    int                  V = 0, failed;
    hpml_ctx_desc        d = { .seed = (uint64_t)o->seed, .threads = (int32_t)o->threads };
    hpml_ctx            *ctx[3] = { hpml_ctx_create(&d), hpml_ctx_create(&d), hpml_ctx_create(&d) };
    const option_words  *files = &o->files;
    hpml_dataset        *data = hpml_dataset_load_text(ctx[0], files->word, files->count, o->context, false);
    const unsigned char *vocabulary = hpml_dataset_vocabulary(data, &V);
    int32_t             *text = (int32_t *)calloc((size_t)o->length + 1, sizeof *text);
    float               *scores = (float *)calloc((size_t)(o->length * (V + 1)), sizeof *scores);
    failed = !data || !text || !scores || train(o, ctx[0], data, V);
    if (!failed) text[0] = ((const int32_t *)data->x)[0];
    failed = failed || generate(ctx[1], o, vocabulary, V, text, scores) || compare(ctx[2], o, text, scores, V);
    for (int i = 0; i < 3; i++) {
        if (hpml_ctx_status(ctx[i]) != HPML_OK) fprintf(stderr, "error: %s\n", hpml_ctx_error(ctx[i]));
        hpml_ctx_free(ctx[i]);
    }
    free(text);
    free(scores);
    return failed;
}

int main(int argc, char **argv)
{
    static const char *const own[] = { "hpml.h", "hpml_comm.h", "hpml_cuda.cuh" };
    options o = { .steps = 300, .batch = 8, .context = 64, .width = 96, .layers = 3, .heads = 6, .kv_heads = 2,
                  .length = 512, .seed = 1, .file = "generate.safetensors" };
    const option table[] = {
        { "FILES", OPTION_WORDS, &o.files, NULL, "the text to learn (hpml's headers, where they are)" },
        { "--steps", OPTION_COUNT, &o.steps, "N", "steps of training (300)" },
        { "--batch", OPTION_COUNT, &o.batch, "N", "windows of text in a step (8)" },
        { "--context", OPTION_COUNT, &o.context, "N", "characters in a window (64)" },
        { "--width", OPTION_COUNT, &o.width, "N", "numbers for each character (96)" },
        { "--layers", OPTION_COUNT, &o.layers, "N", "blocks (3)" },
        { "--heads", OPTION_COUNT, &o.heads, "N", "heads of queries (6)" },
        { "--kv-heads", OPTION_COUNT, &o.kv_heads, "N", "heads of keys and values (2)" },
        { "--length", OPTION_COUNT, &o.length, "N", "characters to generate, at least 4 (512)" },
        { "--file", OPTION_TEXT, &o.file, "FILE", "of the parameters (generate.safetensors)" },
        { "--seed", OPTION_COUNT, &o.seed, "N", "of everything random (1)" },
        { "--threads", OPTION_COUNT, &o.threads, "N", "threads (one for each core)" } };
    int failed = options_read("Learns characters, then generates text with a cache of keys and values.",
                              table, sizeof table / sizeof *table, argc, argv);
    if (failed) return failed == 1 ? 0 : failed;
    for (int i = 0, none = o.files.count == 0; none && i < 3; i++)
        if (i == 0 || access(own[i], R_OK) == 0) o.files.word[o.files.count++] = own[i];
    if (o.length < 4 || o.heads < 1 || o.kv_heads < 1 || o.width % (2 * o.heads) != 0 || o.heads % o.kv_heads != 0)
        return fprintf(stderr, "--length: at least 4; --kv-heads divides --heads, twice --heads divides --width\n"), 2;
    return run(&o);
}
