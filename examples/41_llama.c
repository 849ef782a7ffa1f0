/* What you learn: generating text with a published language model of the Llama family. Difficulty 3 of 4.
   cc -O2 examples/41_llama.c -o llama -lm -lpthread && ./llama FOLDER --prompt "Gravity is"
   ./llama FOLDER --ids "504 2365" --length 0     the likeliest tokens after each of these, with their scores
   FOLDER is a model as Hugging Face has it, such as SmolLM2-135M or Qwen2.5-0.5B: config.json (model_type llama, qwen2
   or mistral), model.safetensors or several files with an index, in F32, BF16 or F16, and for texts vocab.json and
   merges.txt. One graph reads the prompt, 32 tokens at a time; another, with the same parameters, writes token after
   token. In both attention reads the earlier tokens from a cache of keys and values. A field of config.json that asks
   for more than this program computes is an error. Scores are those of transformers up to rounding, a millionth of the
   largest (tests/llama_reference.py compares).
   prints the text, and tokens a second. */
#define HPML_IMPLEMENTATION
#include "../hpml.h"
#include "llama.h" /* reads config.json, the parameters and, by bpe.h, the tokenizer */
#include "options.h"
#include "screen.h"

typedef struct options {
    const char  *prompt, *ids;
    int64_t      length, top, seed, threads;
    double       temperature;
    option_words folder;
} options;

enum { BLOCK = 32 }; /* tokens of the prompt that are read at a time: so many use each weight while it is in a cache */

typedef struct reader { /* a graph that computes the scores after each of `count` tokens */
    int64_t      count;
    hpml_tensor *tokens, *position, *scores; /* I32 (1, count); I32 (1): the first one's place in the text;
                                                (1, count, V) */
    hpml_graph  *graph;
} reader;

typedef struct model {
    llama_config  config;
    hpml_tensor **cache; /* (layers) keys and values of all earlier tokens, which both readers share */
    reader        many, one;
    bpe          *words; /* NULL: tokens are printed as their ids */
} model;

/* A linear layer called model.layers.<layer>.<name>. The parameters are zeros until they are loaded. */
static hpml_tensor *linear(hpml_tensor *x, int64_t out, int64_t layer, const char *name, bool bias)
{
    char             full[64];
    hpml_linear_desc d = { .name = full, .no_bias = !bias, .init = HPML_INIT_ZEROS };
    snprintf(full, sizeof full, "model.layers.%lld.%s", (long long)layer, name);
    return hpml_linear(x, out, &d);
}

static hpml_tensor *norm(hpml_tensor *x, const llama_config *c, int64_t layer, const char *name)
{
    char full[64];
    snprintf(full, sizeof full, "model.layers.%lld.%s", (long long)layer, name);
    return hpml_rmsnorm(x, &(hpml_norm_desc){ .name = full, .eps = (float)c->eps });
}

/* x + attention(norm(x)), then x + network(norm(x)). x (1, count, C) */
static hpml_tensor *block(hpml_tensor *x, const model *m, hpml_tensor *position, int64_t layer)
{
    const llama_config *c = &m->config;
    int32_t             heads = (int32_t)c->heads, kv = (int32_t)c->kv_heads;
    int64_t             kv_width = kv * c->head_width;
    hpml_rotary_desc    turn = { .heads = heads + 2 * kv, .rotated = heads + kv, .base = (float)c->base,
                                 .position = position };
    hpml_attention_desc a = { .heads = heads, .kv_heads = kv, .position = position, .cache = m->cache[layer] };
    hpml_tensor        *h = norm(x, c, layer, "input_layernorm");
    hpml_tensor        *q = linear(h, heads * c->head_width, layer, "self_attn.q_proj", c->qkv_bias);
    hpml_tensor        *k = linear(h, kv_width, layer, "self_attn.k_proj", c->qkv_bias);
    hpml_tensor        *v = linear(h, kv_width, layer, "self_attn.v_proj", c->qkv_bias);
    hpml_tensor        *qkv = hpml_rotary(hpml_concat((hpml_tensor *[]){ q, k, v }, 3, 2), &turn);
    x = hpml_add(x, linear(hpml_attention(qkv, &a), c->width, layer, "self_attn.o_proj", c->out_bias));
    h = norm(x, c, layer, "post_attention_layernorm");
    hpml_tensor *gate = hpml_silu(linear(h, c->inner, layer, "mlp.gate_proj", c->mlp_bias));
    h = hpml_mul(gate, linear(h, c->inner, layer, "mlp.up_proj", c->mlp_bias));
    return hpml_add(x, linear(h, c->width, layer, "mlp.down_proj", c->mlp_bias));
}

/* Records the model for `count` tokens at a time. */
static hpml_status record(hpml_ctx *ctx, const model *m, reader *r, int64_t count)
{
    const llama_config *c = &m->config;
    hpml_embedding_desc table = { .name = "model.embed_tokens", .init = HPML_INIT_ZEROS };
    hpml_norm_desc      last = { .name = "model.norm", .eps = (float)c->eps };
    hpml_linear_desc    head = { .name = "lm_head", .no_bias = true, .init = HPML_INIT_ZEROS };
    hpml_graph_desc     d = { .outputs = &r->scores, .output_count = 1, .predict = true };
    r->count    = count;
    r->tokens   = hpml_input_tokens(ctx, 1, count);
    r->position = hpml_input(ctx, HPML_DTYPE_I32, 1, (int64_t[]){ 1 });
    hpml_tensor *x = hpml_embedding(r->tokens, c->vocabulary, c->width, &table);
    for (int64_t i = 0; i < c->layers && x; i++) x = block(x, m, r->position, i);
    if (c->tied) head.weight = hpml_param_find(ctx, "model.embed_tokens.weight");
    r->scores = hpml_linear(hpml_rmsnorm(x, &last), c->vocabulary, &head);
    r->graph  = hpml_graph_create(ctx, &d);
    return hpml_graph_alloc(r->graph);
}

/* Records the model for a text of up to `end` tokens, of which the first n are read, and loads its parameters. */
static hpml_status load_model(hpml_ctx *ctx, model *m, const char *folder, int64_t n, int64_t end)
{
    const llama_config *c = &m->config;
    const int64_t       blocks = (n + BLOCK - 1) / BLOCK * BLOCK, S = blocks > end ? blocks : end;
    if (llama_check_shapes(ctx, folder, c) != HPML_OK) return hpml_ctx_status(ctx);
    m->cache = (hpml_tensor **)hpml_ctx_alloc(ctx, (size_t)c->layers * sizeof *m->cache, NULL);
    for (int64_t i = 0; i < c->layers && m->cache; i++)
        m->cache[i] = hpml_tensor_create_3d(ctx, 1, S, 2 * c->kv_heads * c->head_width);
    if (!m->cache || record(ctx, m, &m->one, 1) != HPML_OK) return hpml_ctx_status(ctx);
    hpml_share(ctx, true);
    if (n > 1 && record(ctx, m, &m->many, BLOCK) != HPML_OK) return hpml_ctx_status(ctx);
    return llama_load_params(ctx, folder);
}

/* Computes the scores (count, V) of the tokens that may follow each of the `count` ids, at most r->count, the first of
   which is at place `at` of the text. What follows them in a block is computed in vain: no earlier token sees it, and
   the next block overwrites its keys and values. NULL: an error */
static const float *next_scores(const reader *r, const int32_t *ids, int64_t count, int64_t at)
{
    int32_t place = (int32_t)at, block[BLOCK] = { 0 };
    memcpy(block, ids, (size_t)count * sizeof *ids);
    hpml_tensor_set_raw(r->tokens, block, (size_t)r->count * sizeof *block);
    hpml_tensor_set_raw(r->position, &place, sizeof place);
    return hpml_graph_forward(r->graph, false, 0) == HPML_OK ? r->scores->data : NULL;
}

/* Prints a token of a text or, without a tokenizer, its id; *column is where the line ends. */
static void print_token(const bpe *words, int32_t id, int *column)
{
    size_t               length = 0;
    const unsigned char *bytes = words ? bpe_bytes(words, id, &length) : NULL;
    char                 text[24];
    if (!bytes) {
        length = (size_t)snprintf(text, sizeof text, words ? "<%d>" : "%d ", (int)id);
        bytes  = (unsigned char *)text;
    }
    if (!words && *column + (int)length >= screen_columns()) *column = 0, putchar('\n');
    *column += (int)length;
    fwrite(bytes, 1, length, stdout);
    fflush(stdout);
}

/* Runs the model on the n tokens in ids, then draws more until ids has `end` tokens or the text ends; or, if `end` is
   n, prints the likeliest tokens after each of the n. */
static int generate(model *m, const options *o, int32_t *ids, int64_t n, int64_t end)
{
    const reader *r = n > 1 ? &m->many : &m->one;
    const int64_t V = m->config.vocabulary;
    const float  *scores = NULL;
    hpml_rng      rng = { .seed = (uint64_t)o->seed, .stream = 99 };
    double        start = hpml_now(), reading;
    int64_t       i = 0;
    int           column = 0;
    for (int64_t k = 0; k < n && end > n; k++) print_token(m->words, ids[k], &column);
    for (int64_t count; i < n; i += count) {
        count  = n - i < r->count ? n - i : r->count;
        scores = next_scores(r, ids + i, count, i);
        for (int64_t k = 0; k < count && end == n && scores; k++)
            if (!llama_print_top(m->words, scores + k * V, V, i + k, ids[i + k], o->top)) return 1;
        if (!scores) return 1;
        scores += (count - 1) * V;
    }
    reading = hpml_now() - start, start = hpml_now();
    for (; i < end && scores; i++) {
        ids[i] = llama_draw(&rng, scores, V, o->temperature);
        if (llama_is_end(&m->config, ids[i])) break;
        print_token(m->words, ids[i], &column);
        if (i + 1 < end) scores = next_scores(&m->one, ids + i, 1, i);
    }
    if (!scores) return 1;
    if (end == n) return 0;
    printf("\n\n%lld tokens read, %.1f a second; %lld written", (long long)n, (double)n / reading, (long long)(i - n));
    if (i > n + 1) printf(", %.1f a second", (double)(i - n - 1) / (hpml_now() - start));
    printf("\n");
    return 0;
}

/* Loads the tokenizer, which --prompt needs; with --ids it is used where it is. */
static bool load_words(hpml_ctx *ctx, const options *o, model *m)
{
    char path[2][1024], error[1200];
    snprintf(path[0], sizeof path[0], "%s/vocab.json", o->folder.word[0]);
    snprintf(path[1], sizeof path[1], "%s/merges.txt", o->folder.word[0]);
    if (o->ids && access(path[0], R_OK) != 0) return true;
    m->words = bpe_load(path[0], path[1], error, sizeof error);
    if (!m->words) return hpml_ctx_fail(ctx, HPML_ERR_FORMAT, "%s; without these two files give --ids", error), false;
    m->words->cut = m->config.cut;
    return true;
}

static int run(hpml_ctx *ctx, const options *o, model *m)
{
    const llama_config *c = &m->config;
    const char         *folder = o->folder.word[0], *text = o->ids ? o->ids : o->prompt;
    size_t              bytes = strlen(text);
    int32_t            *ids = (int32_t *)calloc(bytes + (size_t)o->length + 1, sizeof *ids);
    int64_t             n = -1, end;
    if (!ids) hpml_ctx_fail(ctx, HPML_ERR_MEMORY, "no memory for %lld tokens", (long long)o->length);
    if (ids && llama_read_config(ctx, folder, &m->config) == HPML_OK && load_words(ctx, o, m))
        n = o->ids ? llama_parse_ids(ctx, text, ids) : bpe_encode(m->words, text, bytes, ids);
    if (n == 0 && c->first >= 0) n = 1, ids[0] = c->first;
    end = n + o->length;
    if (n == 0) hpml_ctx_fail(ctx, HPML_ERR_ARGUMENT, "--prompt, --ids: no token, and config.json has no bos_token_id");
    for (int64_t i = 0; i < n; i++)
        if (ids[i] >= c->vocabulary)
            hpml_ctx_fail(ctx, HPML_ERR_ARGUMENT, "token %lld is %d; the model has the tokens 0 to %lld", (long long)i,
                          (int)ids[i], (long long)c->vocabulary - 1);
    if (n > 0 && (end > c->positions || end > c->window))
        hpml_ctx_fail(ctx, HPML_ERR_UNSUPPORTED, "%s/config.json: %s is %lld; the prompt's %lld tokens and --length "
                      "%lld are more, which is not supported", folder,
                      end > c->positions ? "max_position_embeddings" : "sliding_window",
                      (long long)(end > c->positions ? c->positions : c->window), (long long)n, (long long)o->length);
    int failed = n < 1 || load_model(ctx, m, folder, n, end) != HPML_OK || generate(m, o, ids, n, end);
    free(ids);
    return failed;
}

int main(int argc, char **argv)
{
    options o = { .length = 64, .top = 5, .temperature = 0.8, .seed = 1 };
    model   m = { .words = NULL };
    const option table[] = {
        { "FOLDER", OPTION_WORDS, &o.folder, NULL, "of config.json, model.safetensors ..." },
        { "--prompt", OPTION_TEXT, &o.prompt, "TEXT", "goes on with this text" },
        { "--ids", OPTION_TEXT, &o.ids, "IDS", "goes on with these tokens, as in \"504 2365\"" },
        { "--length", OPTION_COUNT, &o.length, "N", "tokens to write; 0: the likeliest ones (64)" },
        { "--top", OPTION_COUNT, &o.top, "N", "with --length 0: so many after each token (5)" },
        { "--temperature", OPTION_REAL, &o.temperature, "X", "0: always the likeliest token (0.8)" },
        { "--seed", OPTION_COUNT, &o.seed, "N", "of the tokens that are drawn (1)" },
        { "--threads", OPTION_COUNT, &o.threads, "N", "threads (one for each core)" } };
    int failed = options_read("Generates text with a published model of the Llama family.", table,
                              sizeof table / sizeof *table, argc, argv);
    if (failed) return failed == 1 ? 0 : failed;
    if (o.folder.count != 1 || !o.prompt == !o.ids || o.length > INT32_MAX)
        return fprintf(stderr, "expected one FOLDER, and --prompt or --ids; --length: below 2^31\n"), 2;
    hpml_ctx *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = (int32_t)o.threads });
    failed = run(ctx, &o, &m);
    if (hpml_ctx_status(ctx) != HPML_OK) fprintf(stderr, "error: %s\n", hpml_ctx_error(ctx)), failed = 1;
    bpe_free(m.words);
    hpml_ctx_free(ctx);
    return failed;
}
