/* What you learn: generating text with a published language model of the Llama family. Difficulty 3 of 4.
   cc -O2 examples/41_llama.c -o llama -lm -lpthread && ./llama FOLDER --prompt "Gravity is"
   ./llama FOLDER --ids "504 2365" --length 0     the likeliest tokens after each of these, with their scores
   FOLDER is a model as Hugging Face has it, such as SmolLM2-135M or Qwen2.5-0.5B: config.json (model_type llama, qwen2
   or mistral), model.safetensors or several files with an index, in F32, BF16 or F16, and for texts vocab.json and
   merges.txt. The graph computes one token; attention reads the earlier ones from a cache of keys and values. A field
   of config.json that asks for more than this program computes is an error. Scores are those of transformers up to
   rounding, a millionth of the largest (tests/llama_reference.py compares).
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

typedef struct model {
    llama_config config;
    hpml_tensor *token, *position, *scores; /* I32 (1, 1): a token; I32 (1): its place in the text; (1, 1, V) */
    hpml_graph  *graph;
    bpe         *words; /* NULL: tokens are printed as their ids */
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

/* x + attention(norm(x)), then x + network(norm(x)). (1, 1, C); S: positions of the cache */
static hpml_tensor *block(hpml_tensor *x, const model *m, int64_t layer, int64_t S)
{
    const llama_config *c = &m->config;
    int32_t             heads = (int32_t)c->heads, kv = (int32_t)c->kv_heads;
    int64_t             kv_width = kv * c->head_width;
    hpml_tensor        *cache = hpml_tensor_create_3d(x->ctx, 1, S, 2 * kv_width);
    hpml_rotary_desc    turn = { .heads = heads + 2 * kv, .rotated = heads + kv, .base = (float)c->base,
                                 .position = m->position };
    hpml_attention_desc a = { .heads = heads, .kv_heads = kv, .position = m->position, .cache = cache };
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

/* Records the model for one token of a text of up to S, and loads its parameters. */
static hpml_status load_model(hpml_ctx *ctx, model *m, const char *folder, int64_t S)
{
    const llama_config *c = &m->config;
    hpml_embedding_desc table = { .name = "model.embed_tokens", .init = HPML_INIT_ZEROS };
    hpml_norm_desc      last = { .name = "model.norm", .eps = (float)c->eps };
    hpml_linear_desc    head = { .name = "lm_head", .no_bias = true, .init = HPML_INIT_ZEROS };
    hpml_graph_desc     d = { .outputs = &m->scores, .output_count = 1, .predict = true };
    m->token    = hpml_input_tokens(ctx, 1, 1);
    m->position = hpml_input(ctx, HPML_DTYPE_I32, 1, (int64_t[]){ 1 });
    hpml_tensor *x = hpml_embedding(m->token, c->vocabulary, c->width, &table);
    for (int64_t i = 0; i < c->layers && x; i++) x = block(x, m, i, S);
    if (c->tied) head.weight = hpml_param_find(ctx, "model.embed_tokens.weight");
    m->scores = hpml_linear(hpml_rmsnorm(x, &last), c->vocabulary, &head);
    m->graph  = hpml_graph_create(ctx, &d);
    if (hpml_graph_alloc(m->graph) != HPML_OK) return hpml_ctx_status(ctx);
    return llama_load_params(ctx, folder);
}

/* Computes the scores (V) of the tokens that may follow `id`, which is at place `at` of the text. NULL: an error */
static const float *next_scores(model *m, int32_t id, int64_t at)
{
    int32_t place = (int32_t)at;
    hpml_tensor_set_raw(m->token, &id, sizeof id);
    hpml_tensor_set_raw(m->position, &place, sizeof place);
    return hpml_graph_forward(m->graph, false, 0) == HPML_OK ? m->scores->data : NULL;
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

/* Prints the likeliest tokens after token number `at`, which is `id`: their ids, scores, probabilities and texts. */
static bool print_top(const model *m, const options *o, int64_t at, int32_t id, const float *scores)
{
    const int64_t V = m->config.vocabulary;
    llama_ranked *r = llama_rank(scores, V);
    double        sum = 0;
    if (!r) return hpml_ctx_fail(m->scores->ctx, HPML_ERR_MEMORY, "no memory for %lld scores", (long long)V), false;
    printf("after token %lld, which is %d:\n", (long long)at, (int)id);
    for (int64_t i = 0; i < V; i++) sum += exp((double)scores[i] - (double)r[0].score);
    for (int64_t i = 0; i < o->top && i < V; i++) {
        size_t               length = 0;
        const unsigned char *bytes = m->words ? bpe_bytes(m->words, r[i].id, &length) : NULL;
        printf("%8d  %13.7g  %5.1f %%", (int)r[i].id, (double)r[i].score,
               100 * exp((double)r[i].score - (double)r[0].score) / sum);
        if (bytes) printf("  \"");
        for (size_t k = 0; k < length; k++) putchar(bytes[k] < ' ' ? '~' : bytes[k]);
        printf(bytes ? "\"\n" : "\n");
    }
    free(r);
    return true;
}

static bool is_end(const llama_config *c, int32_t id)
{
    for (int32_t i = 0; i < c->end_count; i++)
        if (c->end[i] == id) return true;
    return false;
}

/* Runs the model on the n tokens in ids, then draws more until ids has `end` tokens or the text ends; or, if `end` is
   n, prints the likeliest tokens after each of the n. */
static int generate(model *m, const options *o, int32_t *ids, int64_t n, int64_t end)
{
    const float *scores = NULL;
    hpml_rng     rng = { .seed = (uint64_t)o->seed, .stream = 99 };
    double       start = hpml_now(), reading;
    int64_t      i = 0;
    int          column = 0;
    for (int64_t k = 0; k < n && end > n; k++) print_token(m->words, ids[k], &column);
    for (; i < n; i++) {
        scores = next_scores(m, ids[i], i);
        if (!scores || (end == n && !print_top(m, o, i, ids[i], scores))) return 1;
    }
    reading = hpml_now() - start, start = hpml_now();
    for (; i < end && scores; i++) {
        ids[i] = llama_draw(&rng, scores, m->config.vocabulary, o->temperature);
        if (is_end(&m->config, ids[i])) break;
        print_token(m->words, ids[i], &column);
        if (i + 1 < end) scores = next_scores(m, ids[i], i);
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
    int failed = n < 1 || load_model(ctx, m, folder, end) != HPML_OK || generate(m, o, ids, n, end);
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
