/* For 41_llama.c: reads config.json and the parameters of a published model of the Llama family; draws tokens. Needs
   hpml.h.

   config.json is one JSON object. Fields that change what a model computes are read or, where 41_llama.c does not
   compute that, refused; others (dropout, the type of the numbers ...) are ignored. Sizes are required; other missing
   fields are as in Hugging Face's transformers, but no token begins or ends a text, and positions have no limit. */
#ifndef HPML_LLAMA_H
#define HPML_LLAMA_H

#include "json.h"
#include <unistd.h>

typedef struct llama_config {
    int64_t width, inner, layers, heads, kv_heads, head_width; /* inner: width of the gated network */
    int64_t vocabulary, positions, window; /* window: positions that attention reads, INT32_MAX: all */
    double  eps, base;                     /* of the RMS norms; of the rotary positions */
    bool    tied;                          /* the head is the table of the embedding */
    bool    qkv_bias, out_bias, mlp_bias;
    int32_t first, end[8], end_count;      /* the token that begins a text, -1: none; those that end it */
    bpe_cut cut;
} llama_config;

/* Reads the rotary positions: rope_theta and rope_scaling, or both as rope_parameters, as newer files have them. */
static void llama_rotary(const json_file *f, llama_config *c)
{
    const char *key = json_member(f->root, "rope_parameters") ? "rope_parameters" : "rope_scaling";
    const char *rope = json_member(f->root, key), *kind = json_member(rope, "rope_type");
    if (!kind) kind = json_member(rope, "type");
    if (rope && !(kind && json_is(kind, "\"default\"")))
        json_refuse(f, key, rope, "null, or a rope_type of \"default\"");
    c->base = json_real(f, json_member(rope, "rope_theta") ? rope : f->root, "rope_theta", 10000);
    for (int i = 0; i < 2; i++) {
        const char *object = i ? rope : f->root;
        if (json_real(f, object, "partial_rotary_factor", 1) != 1)
            json_refuse(f, "partial_rotary_factor", json_member(object, "partial_rotary_factor"), "1");
    }
}

/* Reads the ids of tokens, one or a list, of which at most `capacity` are kept; returns how many. */
static int32_t llama_ids(const json_file *f, const char *key, int32_t *ids, int32_t capacity)
{
    const char *p = json_member(f->root, key), *whole = p;
    int32_t     count = 0;
    if (!p) return 0;
    if (*p == '[') p = json_blank(p + 1);
    for (; *p && *p != ']' && count < capacity; p = json_blank(p + (*p == ','))) {
        char      *end;
        const long id = strtol(p, &end, 10);
        if (end != json_end(p, 0) || id < 0 || id > 1 << 24)
            return json_refuse(f, key, whole, "ids, whole numbers from 0 on"), 0;
        ids[count++] = (int32_t)id;
        if (*whole != '[') break;
        p = json_blank(end);
    }
    return count;
}

/* Reads the numbers of heads, and checks that they fit. */
static void llama_heads(const json_file *f, llama_config *c, bool llama)
{
    const char *key = "head_dim", *value = json_member(f->root, key);
    c->heads      = json_count(f, "num_attention_heads", -1, 1);
    c->kv_heads   = json_count(f, "num_key_value_heads", llama ? c->heads : -1, 1);
    c->head_width = json_count(f, key, c->width / c->heads, 1);
    if (!value) key = "hidden_size", value = json_member(f->root, key);
    if (c->heads % c->kv_heads != 0)
        json_refuse(f, "num_key_value_heads", json_member(f->root, "num_key_value_heads"),
                    "a divisor of num_attention_heads");
    if (c->head_width % 2 != 0 || c->head_width > 1024 || (strcmp(key, "hidden_size") == 0 && c->width % c->heads != 0))
        json_refuse(f, key, value, "heads of an even size of at most 1024, which is head_dim or, if that is missing, "
                    "hidden_size / num_attention_heads");
}

/* Reads the fields of config.json, by the rules of model type `kind` where the three types differ. */
static void llama_fields(const json_file *f, llama_config *c, const char *kind)
{
    const bool  llama = json_is(kind, "\"llama\""), qwen2 = json_is(kind, "\"qwen2\"");
    const char *act = json_member(f->root, "hidden_act"), *packed = json_member(f->root, "quantization_config");
    const char *window = json_find(f->root, "sliding_window");
    if (!llama && !qwen2 && !json_is(kind, "\"mistral\""))
        json_refuse(f, "model_type", kind, "\"llama\", \"qwen2\", \"mistral\"");
    if (act && !json_is(act, "\"silu\"")) json_refuse(f, "hidden_act", act, "\"silu\"");
    if (packed) json_refuse(f, "quantization_config", packed, "null, with numbers of type F32, BF16 or F16");
    c->width      = json_count(f, "hidden_size", -1, 1);
    c->inner      = json_count(f, "intermediate_size", -1, 1);
    c->layers     = json_count(f, "num_hidden_layers", -1, 1);
    if (c->layers > 1000) json_refuse(f, "num_hidden_layers", json_member(f->root, "num_hidden_layers"), "up to 1000");
    c->vocabulary = json_count(f, "vocab_size", -1, 1);
    c->positions  = json_count(f, "max_position_embeddings", 1 << 24, 1);
    c->eps        = json_real(f, f->root, "rms_norm_eps", 1e-6);
    c->tied       = json_flag(f, "tie_word_embeddings");
    c->out_bias   = llama && json_flag(f, "attention_bias");
    c->qkv_bias   = qwen2 || c->out_bias;
    c->mlp_bias   = llama && json_flag(f, "mlp_bias");
    c->cut        = qwen2 ? BPE_CUT_QWEN2 : BPE_CUT_SMOLLM;
    c->window     = INT32_MAX;
    if (qwen2 && json_flag(f, "use_sliding_window")) c->window = json_count(f, "sliding_window", 4096, 1);
    if (!llama && !qwen2 && !(window && json_is(window, "null"))) c->window = json_count(f, "sliding_window", 4096, 1);
    c->end_count  = llama_ids(f, "eos_token_id", c->end, (int32_t)(sizeof c->end / sizeof c->end[0]));
    c->first      = -1;
    llama_ids(f, "bos_token_id", &c->first, 1);
    llama_heads(f, c, llama);
    llama_rotary(f, c);
}

/* Reads config.json of a folder; an error is the context's. */
static hpml_status llama_read_config(hpml_ctx *ctx, const char *folder, llama_config *c)
{
    json_file f;
    if (json_open(&f, ctx, folder, "config.json")) {
        const char *kind = json_member(f.root, "model_type");
        if (kind) llama_fields(&f, c, kind);
        else json_refuse(&f, "model_type", NULL, "\"llama\", \"qwen2\", \"mistral\"");
    }
    free(f.text);
    return hpml_ctx_status(ctx);
}

/* Loads the parameters of a model in several files, named in model.safetensors.index.json: each file has its own ones,
   and leaves the others as they are. */
static void llama_load_parts(hpml_ctx *ctx, const char *folder, const json_file *index)
{
    const char  *files = json_member(index->root, "weight_map");
    const int    n = hpml_param_count(ctx);
    const char **of = (const char **)calloc((size_t)n, sizeof *of); /* the file of each parameter, in the index */
    hpml_rename *others = (hpml_rename *)calloc((size_t)n, sizeof *others);
    if (!of || !others) hpml_ctx_fail(ctx, HPML_ERR_MEMORY, "%s: no memory", index->path);
    for (int i = 0; i < n && hpml_ctx_status(ctx) == HPML_OK; i++) {
        const char *name = hpml_param_at(ctx, i)->name;
        of[i] = json_member(files, name);
        if (!of[i] || *of[i] != '"' || strcspn(of[i], "/\\") < (size_t)(json_end(of[i], 0) - of[i]))
            hpml_ctx_fail(ctx, HPML_ERR_FORMAT, "%s: weight_map names no file of this folder for \"%s\"", index->path,
                          name);
    }
    for (int i = 0; i < n && hpml_ctx_status(ctx) == HPML_OK; i++) {
        const int      length = (int)(json_end(of[i], 0) - of[i]) - 2;
        char           path[1024];
        hpml_load_desc d = { .map = others };
        bool           is_first = true;
        for (int k = 0; k < n; k++) {
            const bool same = strncmp(of[k], of[i], (size_t)length + 2) == 0;
            if (same && k < i) is_first = false;
            if (!same) others[d.map_count++].to = hpml_param_at(ctx, k)->name; /* .from is NULL: not loaded */
        }
        snprintf(path, sizeof path, "%s/%.*s", folder, length, of[i] + 1);
        if (is_first) hpml_params_load_as(ctx, path, &d);
    }
    free(others);
    free(of);
}

/* Loads the parameters of the context: from model.safetensors, or from the files that its index names. */
static hpml_status llama_load_params(hpml_ctx *ctx, const char *folder)
{
    char      path[1024];
    json_file index;
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", folder);
    if (access(path, R_OK) == 0) {
        if (json_open(&index, ctx, folder, "model.safetensors.index.json")) llama_load_parts(ctx, folder, &index);
        free(index.text);
        return hpml_ctx_status(ctx);
    }
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    return hpml_params_load(ctx, path);
}

/* Reads ids with spaces or commas between them; returns how many, -1: the context has an error. */
static int64_t llama_parse_ids(hpml_ctx *ctx, const char *text, int32_t *ids)
{
    const char *separators = " ,\n\t";
    int64_t     n = 0;
    for (text += strspn(text, separators); *text; text += strspn(text, separators)) {
        const int  length = (int)strcspn(text, separators);
        char      *end;
        const long id = strtol(text, &end, 10);
        if (end != text + length || id < 0 || id > 1 << 24) {
            hpml_ctx_fail(ctx, HPML_ERR_ARGUMENT, "--ids: %.*s: expected whole numbers from 0 on", length, text);
            return -1;
        }
        ids[n++] = (int32_t)id;
        text     = end;
    }
    return n;
}

static int32_t llama_likeliest(const float *scores, int64_t V)
{
    int64_t most = 0;
    for (int64_t i = 1; i < V; i++)
        if (scores[i] > scores[most]) most = i;
    return (int32_t)most;
}

/* Draws a token with a probability proportional to exp(score / temperature); temperature 0: the likeliest one. */
static int32_t llama_draw(hpml_rng *rng, const float *scores, int64_t V, double temperature)
{
    const double most = (double)scores[llama_likeliest(scores, V)];
    double       sum = 0, pick;
    if (!(temperature > 0)) return llama_likeliest(scores, V);
    for (int64_t i = 0; i < V; i++) sum += exp(((double)scores[i] - most) / temperature);
    pick = (double)hpml_rng_uniform(rng) * sum;
    for (int64_t i = 0; i < V; i++)
        if ((pick -= exp(((double)scores[i] - most) / temperature)) < 0) return (int32_t)i;
    return llama_likeliest(scores, V);
}

typedef struct llama_ranked {
    float   score;
    int32_t id;
} llama_ranked;

static int llama_compare(const void *a, const void *b)
{
    const llama_ranked *x = (const llama_ranked *)a, *y = (const llama_ranked *)b;
    if (x->score != y->score) return x->score > y->score ? -1 : 1;
    return x->id < y->id ? -1 : 1;
}

/* The tokens by falling score, in memory that the caller frees; NULL: no memory. */
static llama_ranked *llama_rank(const float *scores, int64_t V)
{
    llama_ranked *r = (llama_ranked *)malloc((size_t)V * sizeof *r);
    for (int64_t i = 0; r && i < V; i++) r[i].score = scores[i], r[i].id = (int32_t)i;
    if (r) qsort(r, (size_t)V, sizeof *r, llama_compare);
    return r;
}

/* Prints the `most` likeliest tokens after token number `at`, which is `id`: ids, scores (V), probabilities and, with a
   tokenizer, texts. False: no memory, with an error. */
static bool llama_print_top(const bpe *words, const float *scores, int64_t V, int64_t at, int32_t id, int64_t most)
{
    llama_ranked *r = llama_rank(scores, V);
    double        sum = 0;
    if (!r) return fprintf(stderr, "no memory for %lld scores\n", (long long)V), false;
    printf("after token %lld, which is %d:\n", (long long)at, (int)id);
    for (int64_t i = 0; i < V; i++) sum += exp((double)scores[i] - (double)r[0].score);
    for (int64_t i = 0; i < most && i < V; i++) {
        size_t               length = 0;
        const unsigned char *bytes = words ? bpe_bytes(words, r[i].id, &length) : NULL;
        printf("%8d  %13.7g  %5.1f %%", (int)r[i].id, (double)r[i].score,
               100 * exp((double)r[i].score - (double)r[0].score) / sum);
        if (bytes) printf("  \"");
        for (size_t k = 0; k < length; k++) putchar(bytes[k] < ' ' ? '~' : bytes[k]);
        printf(bytes ? "\"\n" : "\n");
    }
    free(r);
    return true;
}

static bool llama_is_end(const llama_config *c, int32_t id)
{
    for (int32_t i = 0; i < c->end_count; i++)
        if (c->end[i] == id) return true;
    return false;
}

#endif
