/* What you learn: training a real language model, GPT-2 with 124 M parameters, on one GPU, how much of the GPU's peak
   that uses (>>gpu-tour of hpml_cuda.cuh follows one step), and generating text. Difficulty 3 of 4.
   nvcc -O2 -arch=native examples/11_gpt2.cu -lcublasLt -lcudnn -o gpt2    or for the CPU alone, without nvcc:
   c++ -O2 -x c++ examples/11_gpt2.cu -lm -lpthread -o gpt2
   ./gpt2 [--tokens FILE] [--weights model.safetensors] [--profile]; --help lists all options
   ./gpt2 --weights model.safetensors --bpe FOLDER --steps 0 --prompt "A text that goes on:" (--cpu: on the CPU)
   ./gpt2 --cpu --layers 2 --width 64 --heads 4 --context 64 --vocabulary 256 --lr 0.003 --steps 500 --prompt "static "
   --tokens: 16-bit tokens, bare or with llm.c's header; any other file is a text (default: hpml.h).
   --weights: GPT-2's as published in safetensors; without, random ones. --bpe: a folder with GPT-2's vocab.json and
   merges.txt, for texts; without, each byte is a token. Prints loss, tokens/s and MFU: the part of the GPU's peak that
   is the model's own arithmetic, 6 parameters + 12 layers width context for each token; then the counts of
   hpml_cuda_text and, with --profile, the GPU's time for each layer. The clock chooses among cuBLASLt's products
   (hpml_cuda_desc.tune), except with --no-tune. With --prompt: a text, and the time of early and late tokens, which
   grows linearly, because attention reads earlier keys and values from a cache. */
#define HPML_IMPLEMENTATION
#include "../hpml_cuda.cuh" /* c++ compiles hpml.h's body, and of this header declarations alone */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "gpt2.h" /* options; reads tokens and weights; draws tokens */

/* A layer of GPT-2, named as in the published weights. */
static hpml_tensor *linear(hpml_tensor *x, int64_t out, const char *name, float scale, hpml_act act)
{
    hpml_linear_desc d = {};
    d.name = name, d.init = HPML_INIT_NORMAL, d.init_scale = scale, d.activation = act;
    return hpml_linear(x, out, &d);
}

static hpml_tensor *norm(hpml_tensor *x, const char *name)
{
    hpml_norm_desc d = {};
    d.name = name;
    return hpml_layernorm(x, &d);
}

/* position: of the one token that is computed; attention has a cache then. NULL: a whole window. (B, T, C) */
static hpml_tensor *block(hpml_tensor *x, const options *o, int64_t layer, hpml_tensor *position)
{
    char                name[6][64];
    const char *const   parts[6] = { "ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj" };
    float               small = 0.02f / sqrtf(2 * (float)o->layers); /* residual branches start small */
    hpml_attention_desc heads = {};
    heads.heads = (int32_t)o->heads, heads.position = position;
    if (position) heads.cache = hpml_tensor_create_3d(x->ctx, 1, o->context, 2 * o->width);
    for (int i = 0; i < 6; i++) snprintf(name[i], sizeof name[i], "h.%d.%s", (int)layer, parts[i]);
    hpml_tensor *a = linear(norm(x, name[0]), 3 * o->width, name[1], 0.02f, HPML_ACT_NONE); /* (B, T, 3C) */
    x = hpml_add(x, linear(hpml_attention(a, &heads), o->width, name[2], small, HPML_ACT_NONE));
    a = linear(norm(x, name[3]), 4 * o->width, name[4], 0.02f, HPML_ACT_GELU);               /* (B, T, 4C) */
    return hpml_add(x, linear(a, o->width, name[5], small, HPML_ACT_NONE));
}

/* (B, T) -> (B, T, V) */
static hpml_tensor *record_model(hpml_ctx *ctx, const options *o, hpml_tensor *tokens, hpml_tensor *position)
{
    hpml_embedding_desc table = {}, rows = {};
    hpml_linear_desc    head  = {};
    hpml_param_desc     place = {};
    hpml_share(ctx, true); /* the model that generates has the parameters of the one that trains */
    table.name = "wte", table.init = HPML_INIT_NORMAL, table.init_scale = 0.02f;
    place.name = "wpe.weight", place.init = HPML_INIT_NORMAL, place.init_scale = 0.02f;
    place.ndim = 2, place.shape[0] = o->context, place.shape[1] = o->width;
    hpml_tensor *x = hpml_embedding(tokens, o->vocabulary, o->width, &table);
    rows.weight    = hpml_param_create(ctx, &place);
    x = hpml_add(x, position ? hpml_embedding(position, o->context, o->width, &rows) : rows.weight);
    for (int64_t i = 0; i < o->layers; i++) x = block(x, o, i, position);
    head.no_bias = true, head.weight = hpml_param_find(ctx, "wte.weight"); /* tied */
    return hpml_linear(norm(x, "ln_f"), o->vocabulary, &head);
}

typedef struct meter {
    const options *o;
    double         flops, start; /* FLOP of a token; when step 6 began, because the first steps warm up */
    double         loss, tokens_per_second, mfu;
} meter;

static int on_step(const hpml_step_info *i, void *user)
{
    meter *m = (meter *)user;
    if (i->step == 5) m->start = hpml_now();
    m->loss = i->loss;
    if (i->step > 5)
        m->tokens_per_second = (double)((i->step - 5) * m->o->batch * m->o->context) / (hpml_now() - m->start);
    m->mfu = m->o->peak > 0 ? m->tokens_per_second * m->flops / (m->o->peak * 1e12) : 0;
    if (i->step % 10 != 0 && i->step != 1) return 0;
    printf("step %lld  loss %.4f  norm %.3f  %.0f tokens/s", (long long)i->step, (double)i->loss, (double)i->grad_norm,
           m->tokens_per_second);
    if (m->mfu > 0) printf("  MFU %.1f %%", 100 * m->mfu);
    printf("\n");
    fflush(stdout);
    return 0;
}

/* Prints the counts of hpml_cuda_text, and the time for each layer, in three more steps that are not recorded. */
static int report(hpml_ctx *ctx, const options *o, hpml_trainer *t, hpml_dataset *data)
{
    static char   text[65536];
    hpml_fit_desc fit = {};
    if (!o->cpu) print_counts(ctx);
    if (!o->profile) return 0;
    hpml_profile_enable(hpml_trainer_graph(t), true);
    fit.epochs = INT32_MAX, fit.max_steps = 3;
    if (hpml_trainer_fit(t, data, &fit) != HPML_OK) return 1;
    hpml_profile_text(hpml_trainer_graph(t), text, sizeof text);
    printf("%s", text);
    return 0;
}

static int train(hpml_ctx *ctx, const options *o, const char *device)
{
    hpml_dataset     *data = load_tokens(ctx, o->tokens, o->context, o->words, o->vocabulary);
    hpml_trainer_desc d    = {};
    hpml_fit_desc     fit  = {};
    meter             m    = {};
    hpml_memory       need;
    d.input  = hpml_input_tokens(ctx, o->batch, o->context);
    d.output = record_model(ctx, o, d.input, NULL);
    d.optimizer = HPML_OPT_ADAMW, d.lr = (float)o->lr, d.beta2 = 0.95f, d.weight_decay = 0.1f, d.clip_norm = 1;
    d.schedule.kind = HPML_SCHEDULE_COSINE, d.schedule.warmup_steps = o->steps / 10, d.schedule.total_steps = o->steps;
    hpml_trainer *t = data ? hpml_trainer_create(ctx, &d) : NULL;
    if (!t || (o->weights && load_weights(ctx, o->weights) != HPML_OK)) return 1;
    hpml_graph_memory(hpml_trainer_graph(t), &need);
    m.o = o, m.flops = 6 * (double)hpml_param_total(ctx) + 12.0 * (double)(o->layers * o->width * o->context);
    printf("%s, %s: %.1f M parameters, %lld x %lld tokens a step, %.2f GB\n", device, o->precision,
           1e-6 * (double)hpml_param_total(ctx), (long long)o->batch, (long long)o->context, 1e-9 * (double)need.total);
    fit.epochs = INT32_MAX, fit.max_steps = o->steps, fit.on_step = on_step, fit.user = &m;
    if (hpml_trainer_fit(t, data, &fit) != HPML_OK || (o->save && hpml_checkpoint_save(t, o->save) != HPML_OK))
        return 1;
    if (report(ctx, o, t, data) != 0) return 1;
    if (o->json)
        printf("{\"loss\": %.5f, \"tokens_per_second\": %.0f, \"mfu\": %.4f, \"parameters\": %lld, "
               "\"precision\": \"%s\", \"device\": \"%s\"}\n",
               m.loss, m.tokens_per_second, m.mfu, (long long)hpml_param_total(ctx), o->precision, device);
    return 0;
}

/* A graph of the model that computes one token, or, with position NULL, a window of the context's length. */
static hpml_graph *predictor(hpml_ctx *ctx, const options *o, hpml_tensor *tokens, hpml_tensor *position,
                             hpml_tensor **scores)
{
    hpml_graph_desc d = {};
    *scores   = record_model(ctx, o, tokens, position);
    d.outputs = scores, d.output_count = 1, d.predict = true;
    hpml_graph *g = hpml_graph_create(ctx, &d);
    return hpml_graph_alloc(g) == HPML_OK ? g : NULL;
}

/* Compares scores (count, V), computed token by token, with those of one pass over the whole window. */
static int compare(hpml_ctx *ctx, const options *o, const int32_t *ids, int64_t count, const float *scores)
{
    hpml_tensor *tokens = hpml_input_tokens(ctx, 1, o->context), *y;
    hpml_graph  *g = predictor(ctx, o, tokens, NULL, &y);
    int64_t      n = o->context * o->vocabulary;
    float       *all = g ? (float *)malloc((size_t)n * sizeof *all) : NULL;
    double       worst = 0, start = hpml_now();
    hpml_tensor_set_raw(tokens, ids, (size_t)o->context * sizeof *ids);
    bool done = all && hpml_graph_forward(g, false, 0) == HPML_OK && hpml_tensor_get(y, all, n) == HPML_OK;
    for (int64_t i = 0; done && i < count * o->vocabulary; i++) worst = fmax(worst, fabs((double)all[i] - scores[i]));
    free(all);
    printf("a pass over the whole window: %.0f ms; scores differ by %.1e at most\n", 1e3 * (hpml_now() - start), worst);
    return !done || (strcmp(o->precision, "f32") == 0 && !(worst <= 1e-4)); /* halves round more */
}

/* Computes the scores of the token that follows `id`, the token number `at` of the text. */
static bool next_scores(hpml_graph *g, hpml_tensor *const in[3], int32_t id, int32_t at, float *scores)
{
    hpml_tensor_set_raw(in[0], &id, sizeof id);
    hpml_tensor_set_raw(in[1], &at, sizeof at);
    return hpml_graph_forward(g, false, 0) == HPML_OK &&
           hpml_tensor_get(in[2], scores, hpml_tensor_count(in[2])) == HPML_OK;
}

/* Goes on with the prompt, whose n tokens are in ids, up to `end` tokens. scores: memory for (context, V). */
static int generate(hpml_ctx *ctx, const options *o, int32_t *ids, int64_t n, int64_t end, float *scores)
{
    const int64_t one = 1, V = o->vocabulary, known = o->words ? o->words->count : 256, part = (end + 2) / 4;
    hpml_tensor  *in[3] = { hpml_input_tokens(ctx, 1, 1), hpml_input(ctx, HPML_DTYPE_I32, 1, &one), NULL };
    hpml_graph   *g = predictor(ctx, o, in[0], in[1], &in[2]);
    int32_t       stop = o->words ? bpe_find(o->words, "<|endoftext|>", 13) : -1;
    double        seconds[2] = { 0, 0 };
    int64_t       i = 0;
    hpml_rng      rng = {};
    rng.seed = (uint64_t)o->seed, rng.stream = 99;
    if (!g || (o->steps == 0 && o->weights && load_weights(ctx, o->weights) != HPML_OK)) return 1;
    printf("\n%s", o->prompt);
    for (; i + 1 < end && (i < n || ids[i] != stop); i++) {
        double start = hpml_now();
        float *s = scores + (o->check ? i * V : 0);
        if (!next_scores(g, in, ids[i], (int32_t)i, s)) return 1;
        if (i < part) seconds[0] += hpml_now() - start;
        if (i + 1 >= end - part) seconds[1] += hpml_now() - start;
        if (i + 1 < n) continue;
        ids[i + 1] = draw_token(&rng, s, known, o->temperature, o->top_k);
        print_token(o->words, ids[i + 1]);
    }
    printf("\n\n");
    if (i + 1 == end)
        printf("%lld tokens; one takes %.0f us in the first quarter, %.0f us in the last\n", (long long)end,
               1e6 * seconds[0] / (double)part, 1e6 * seconds[1] / (double)part);
    return o->check ? compare(ctx, o, ids, i, scores) : 0;
}

static int text(hpml_ctx *ctx, const options *o)
{
    size_t   bytes = strlen(o->prompt), rows = o->check ? (size_t)o->context : 1;
    int32_t *ids = (int32_t *)calloc((size_t)o->context + bytes + 1, sizeof *ids);
    float   *scores = (float *)malloc(rows * (size_t)o->vocabulary * sizeof *scores);
    int64_t  n = ids && scores ? text_tokens(o->words, o->prompt, bytes, ids) : -1, end = n + o->length;
    int      failed = 1;
    if (n == 0) n = 1, ids[0] = o->words ? bpe_find(o->words, "<|endoftext|>", 13) : '\n';
    if (end > o->context) end = o->context;
    if (n < 0) hpml_ctx_fail(ctx, HPML_ERR_MEMORY, "--prompt: no memory");
    else if (n > o->context || ids[0] < 0)
        hpml_ctx_fail(ctx, HPML_ERR_ARGUMENT, "--prompt: %lld tokens; expected 1 to %lld (--context)", (long long)n,
                      (long long)o->context);
    else failed = generate(ctx, o, ids, n, end, scores);
    free(scores);
    free(ids);
    return failed;
}

int main(int argc, char **argv)
{
    options        o    = {};
    hpml_cuda_desc gpu  = {};
    hpml_cuda_info info = {};
    hpml_ctx_desc  desc = {};
    int            failed = parse(&o, argc, argv);
    if (failed == 0) failed = choose_device(&o, &desc, &gpu, &info);
    if (failed) return failed == 1 ? 0 : failed;
    desc.seed = (uint64_t)o.seed;
    hpml_ctx *ctx = hpml_ctx_create(&desc);
    o.words = o.folder ? load_bpe(ctx, o.folder) : NULL;
    o.vocabulary = vocabulary_size(ctx, o.weights, o.words, o.vocabulary);
    failed = hpml_ctx_status(ctx) != HPML_OK || (o.steps > 0 && train(ctx, &o, info.name));
    failed = failed || (o.prompt && text(ctx, &o));
    if (hpml_ctx_status(ctx) != HPML_OK) fprintf(stderr, "error: %s\n", hpml_ctx_error(ctx)), failed = 1;
    bpe_free(o.words);
    hpml_ctx_free(ctx);
    return failed;
}
