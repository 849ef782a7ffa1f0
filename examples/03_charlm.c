/* What you learn: a GPT-style language model over characters: embeddings, attention, residual blocks.
   Difficulty 3 of 4.
   cc -O2 examples/03_charlm.c -o charlm -lm -lpthread && ./charlm [options] [text files; default: hpml's headers]
   prints the loss while it trains, the loss on the last tenth of the text, which it has not seen, and text of its
   own. */
#define HPML_IMPLEMENTATION
#include "../hpml.h"
#include "options.h"
#include "screen.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct options {
    int64_t      steps, batch, context, width, layers, heads, seed, threads, length;
    double       lr, dropout;
    int          json;
    option_words files;
} options;

static int parse(options *o, int argc, char **argv)
{
    static const char *const own[] = { "hpml.h", "hpml_comm.h", "hpml_cuda.cuh" };
    const option             table[] = {
        { "FILES", OPTION_WORDS, &o->files, NULL, "the text to learn (hpml's headers, where they are)" },
        { "--steps", OPTION_COUNT, &o->steps, "N", "steps of training (3000)" },
        { "--batch", OPTION_COUNT, &o->batch, "N", "windows of text in a step (16)" },
        { "--context", OPTION_COUNT, &o->context, "N", "characters in a window (64)" },
        { "--width", OPTION_COUNT, &o->width, "N", "numbers for each character (128)" },
        { "--layers", OPTION_COUNT, &o->layers, "N", "transformer blocks (4)" },
        { "--heads", OPTION_COUNT, &o->heads, "N", "attention heads (4)" },
        { "--lr", OPTION_REAL, &o->lr, "X", "learning rate (0.002)" },
        { "--dropout", OPTION_REAL, &o->dropout, "X", "share of numbers set to 0 while training (0)" },
        { "--seed", OPTION_COUNT, &o->seed, "N", "of everything random (1)" },
        { "--threads", OPTION_COUNT, &o->threads, "N", "threads (one for each core)" },
        { "--length", OPTION_COUNT, &o->length, "N", "characters to generate at the end (400)" },
        { "--json", OPTION_FLAG, &o->json, NULL, "a JSON object as last line" } };
    int failed = options_read("Learns to write like the text it is given, character by character.", table,
                              sizeof table / sizeof *table, argc, argv);
    if (failed) return failed;
    for (int i = 0, none = o->files.count == 0; none && i < 3; i++)
        if (i == 0 || access(own[i], R_OK) == 0) o->files.word[o->files.count++] = own[i];
    if (o->steps < 1) return fprintf(stderr, "--steps: at least 1\n"), 2;
    return 0;
}

/* x + f(norm(x)), twice: attention mixes positions, the two-layer network works on each. */
static hpml_tensor *block(hpml_tensor *x, const options *o) /* (B, T, C) */
{
    float            small = 0.02f / sqrtf(2 * (float)o->layers); /* residual branches start small, as in GPT-2 */
    hpml_linear_desc in    = { .init = HPML_INIT_NORMAL, .init_scale = 0.02f };
    hpml_linear_desc wide  = { .init = HPML_INIT_NORMAL, .init_scale = 0.02f, .activation = HPML_ACT_GELU };
    hpml_linear_desc out   = { .init = HPML_INIT_NORMAL, .init_scale = small };
    hpml_attention_desc heads = { .heads = (int32_t)o->heads };
    hpml_tensor *a = hpml_attention(hpml_linear(hpml_layernorm(x, NULL), 3 * o->width, &in), &heads); /* (B, T, C) */
    a = hpml_linear(a, o->width, &out);
    x = hpml_add(x, o->dropout > 0 ? hpml_dropout(a, (float)o->dropout) : a);
    a = hpml_linear(hpml_linear(hpml_layernorm(x, NULL), 4 * o->width, &wide), o->width, &out);
    return hpml_add(x, o->dropout > 0 ? hpml_dropout(a, (float)o->dropout) : a);
}

/* (B, T) -> (B, T, V) */
static hpml_tensor *record_model(hpml_ctx *ctx, const options *o, hpml_tensor *tokens, int vocabulary)
{
    hpml_embedding_desc table    = { .init = HPML_INIT_NORMAL, .init_scale = 0.02f };
    hpml_linear_desc    head     = { .init = HPML_INIT_NORMAL, .init_scale = 0.02f, .no_bias = true };
    hpml_param_desc     position = { .ndim = 2, .shape = { o->context, o->width }, .name = "position",
                                     .init = HPML_INIT_NORMAL, .init_scale = 0.02f };
    hpml_tensor        *x = hpml_add(hpml_embedding(tokens, vocabulary, o->width, &table),
                                     hpml_param_create(ctx, &position));
    for (int64_t i = 0; i < o->layers; i++) x = block(x, o);
    return hpml_linear(hpml_layernorm(x, NULL), vocabulary, &head);
}

static int progress(const hpml_step_info *i, void *user)
{
    static const int64_t every = 200;
    double              *smooth = (double *)user;
    *smooth = i->step == 1 ? (double)i->loss : 0.99 * *smooth + 0.01 * (double)i->loss;
    if (i->step % every == 0) {
        printf("step %lld  loss %.3f nats, %.3f bits per character  lr %.5f  %.0f s\n", (long long)i->step, *smooth,
               *smooth / 0.6931471806, (double)i->lr, i->seconds);
        fflush(stdout);
    }
    return 0;
}

/* Draws characters one by one: the model sees the last `context` and gives scores for the next. */
static void generate(hpml_ctx *ctx, hpml_trainer *t, const options *o, hpml_dataset *text,
                     const unsigned char *vocabulary, int V)
{
    int32_t *window = (int32_t *)calloc((size_t)o->context, sizeof *window);
    float   *scores = (float *)malloc(sizeof(float) * (size_t)(o->context * V));
    hpml_rng rng    = { .seed = (uint64_t)o->seed, .stream = 99 };
    int64_t  have   = 1, column = 0;
    if (!window || !scores) return;
    window[0] = ((const int32_t *)text->x)[0];
    printf("\n");
    for (int64_t n = 0; n < o->length && hpml_ctx_status(ctx) == HPML_OK; n++) {
        float *s = scores + (have - 1) * V, most = -1e30f, sum = 0, pick;
        int    c = 0;
        if (hpml_trainer_predict(t, window, 1, scores) != HPML_OK) break;
        for (int i = 0; i < V; i++) most = s[i] > most ? s[i] : most;
        for (int i = 0; i < V; i++) sum += s[i] = expf((s[i] - most) / 0.8f);
        pick = hpml_rng_uniform(&rng) * sum;
        while (c < V - 1 && (pick -= s[c]) > 0) c++;
        column = vocabulary[c] == '\n' ? 0 : column + 1;
        if (column >= screen_columns()) column = 1, putchar('\n');
        putchar(vocabulary[c]);
        if (have == o->context) memmove(window, window + 1, sizeof *window * (size_t)--have);
        window[have++] = c;
    }
    printf("\n");
    free(window);
    free(scores);
}

static int train(hpml_ctx *ctx, const options *o)
{
    int                  V = 0;
    const option_words  *files = &o->files;
    hpml_dataset        *text = hpml_dataset_load_text(ctx, files->word, files->count, o->context, false), *seen, *rest;
    const unsigned char *vocabulary = hpml_dataset_vocabulary(text, &V);
    int64_t              cut = text ? text->count * 9 / 10 : 0;
    hpml_tensor         *tokens = hpml_input_tokens(ctx, o->batch, o->context);
    hpml_metrics         m = { 0 };
    double               smooth = 0, start;
    hpml_loader_desc     loader = { .samples_per_epoch = o->steps * o->batch };
    hpml_fit_desc        fit = { .on_step = progress, .user = &smooth, .loader = &loader };
    hpml_trainer_desc    desc = { .input = tokens, .optimizer = HPML_OPT_ADAMW, .lr = (float)o->lr, .beta2 = 0.99f,
                                  .weight_decay = 0.1f, .clip_norm = 1,
                                  .schedule = { .kind = HPML_SCHEDULE_COSINE, .total_steps = o->steps,
                                                .warmup_steps = o->steps < 200 ? o->steps / 2 : 100,
                                                .min_lr = (float)o->lr / 10 } };
    hpml_trainer        *t;
    if (!text) return 1;
    desc.output = record_model(ctx, o, tokens, V);
    t    = hpml_trainer_create(ctx, &desc);
    seen = hpml_dataset_slice(text, 0, cut - o->context);      /* no window reaches into the rest */
    rest = hpml_dataset_slice(text, cut, text->count - cut);
    if (!t || !seen || !rest) return 1;
    rest->x_step = rest->y_step = o->context;                  /* each character of the rest once */
    rest->count  = (rest->count + o->context - 1) / o->context;
    printf("%lld characters, %d different, %lld parameters\n", (long long)(text->count + o->context), V,
           (long long)hpml_param_total(ctx));
    start = hpml_now();
    if (hpml_trainer_fit(t, seen, &fit) != HPML_OK) return 1;
    start = hpml_now() - start;
    if (hpml_trainer_evaluate(t, rest, &m) != HPML_OK) return 1;
    printf("unseen text: %.4f nats, %.3f bits per character; %.1f s of training\n", m.loss,
           m.loss / 0.6931471806, start);
    generate(ctx, t, o, text, vocabulary, V);
    if (o->json)
        printf("{\"validation_loss\": %.6f, \"bits_per_character\": %.6f, \"train_seconds\": %.3f, "
               "\"parameters\": %lld, \"steps\": %lld, \"weights_hash\": \"%016llx\"}\n",
               m.loss, m.loss / 0.6931471806, start, (long long)hpml_param_total(ctx), (long long)o->steps,
               (unsigned long long)hpml_param_hash(ctx));
    return 0;
}

int main(int argc, char **argv)
{
    options   o = { .steps = 3000, .batch = 16, .context = 64, .width = 128, .layers = 4, .heads = 4, .seed = 1,
                    .length = 400, .lr = 0.002 };
    int       failed = parse(&o, argc, argv);
    hpml_ctx *ctx;
    if (failed) return failed == 1 ? 0 : failed;
    ctx    = hpml_ctx_create(&(hpml_ctx_desc){ .seed = (uint64_t)o.seed, .threads = (int32_t)o.threads });
    failed = train(ctx, &o);
    if (hpml_ctx_status(ctx) != HPML_OK) fprintf(stderr, "error: %s\n", hpml_ctx_error(ctx)), failed = 1;
    hpml_ctx_free(ctx);
    return failed;
}
