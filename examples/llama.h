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

/* The name of the file that has this parameter, a string in the index; NULL: the context has an error. */
static const char *llama_file_of(const json_file *index, const char *name)
{
    const char *file = json_member(json_member(index->root, "weight_map"), name);
    if (file && *file == '"' && strcspn(file, "/\\") >= (size_t)(json_end(file, 0) - file)) return file;
    hpml_ctx_fail(index->ctx, HPML_ERR_FORMAT, "%s: weight_map names no file of this folder for \"%s\"", index->path,
                  name);
    return NULL;
}

typedef struct llama_files { /* the files with the parameters, of which one is open */
    hpml_ctx         *ctx;
    const char       *folder;
    json_file         index;
    bool              is_indexed; /* false: there is only model.safetensors */
    char              path[1024];
    hpml_safetensors *open; /* the file `path`, NULL: none */
} llama_files;

/* Reads the index, if there is one; false: the context has an error. */
static bool llama_open(llama_files *f, hpml_ctx *ctx, const char *folder)
{
    memset(f, 0, sizeof *f);
    f->ctx = ctx, f->folder = folder;
    snprintf(f->path, sizeof f->path, "%s/model.safetensors.index.json", folder);
    f->is_indexed = access(f->path, R_OK) == 0;
    return !f->is_indexed || json_open(&f->index, ctx, folder, "model.safetensors.index.json");
}

/* Opens the file that has this parameter, unless it is the open one; false: the context has an error. */
static bool llama_turn_to(llama_files *f, const char *name)
{
    char        path[1024];
    const char *file = f->is_indexed ? llama_file_of(&f->index, name) : "\"model.safetensors\"";
    if (!file) return false;
    snprintf(path, sizeof path, "%s/%.*s", f->folder, (int)(json_end(file, 0) - file) - 2, file + 1);
    if (f->open && strcmp(path, f->path) == 0) return true;
    hpml_safetensors_close(f->open);
    snprintf(f->path, sizeof f->path, "%s", path);
    f->open = hpml_safetensors_open(f->ctx, path);
    return f->open != NULL;
}

/* Fails unless the files have an array of this name and of rows x columns or, with columns 0, of rows numbers. */
static bool llama_expect(llama_files *f, const char *name, int64_t rows, int64_t columns)
{
    hpml_safetensor e;
    char            shape[HPML_MAX_DIMS * 21 + 1] = "", wanted[44];
    const int       ndim = columns > 0 ? 2 : 1;
    if (!llama_turn_to(f, name)) return false;
    if (!hpml_safetensors_find(f->open, name, &e)) {
        hpml_ctx_fail(f->ctx, HPML_ERR_FORMAT, "\"%s\": no tensor \"%s\", which config.json asks for", f->path, name);
        return false;
    }
    if (e.ndim == ndim && e.shape[0] == rows && (ndim == 1 || e.shape[1] == columns)) return true;
    for (int i = 0, n = 0; i < e.ndim; i++)
        n += snprintf(shape + n, sizeof shape - (size_t)n, "%s%lld", i > 0 ? "x" : "", (long long)e.shape[i]);
    const int length = snprintf(wanted, sizeof wanted, "%lld", (long long)rows);
    if (ndim == 2) snprintf(wanted + length, sizeof wanted - (size_t)length, "x%lld", (long long)columns);
    hpml_ctx_fail(f->ctx, HPML_ERR_SHAPE, "\"%s\": \"%s\" is %s, config.json expects %s; take both files from the same "
                  "model", f->path, name, shape, wanted);
    return false;
}

/* Compares the shapes of a layer's matrices with config.json. */
static bool llama_expect_layer(llama_files *f, const llama_config *c, int64_t layer)
{
    const int64_t queries = c->heads * c->head_width, keys = c->kv_heads * c->head_width;
    const struct {
        const char *name;
        int64_t     rows, columns;
    } array[] = { { "input_layernorm", c->width, 0 }, { "self_attn.q_proj", queries, c->width },
                  { "self_attn.k_proj", keys, c->width }, { "self_attn.v_proj", keys, c->width },
                  { "self_attn.o_proj", c->width, queries }, { "mlp.gate_proj", c->inner, c->width },
                  { "mlp.up_proj", c->inner, c->width }, { "mlp.down_proj", c->width, c->inner } };
    for (size_t i = 0; i < sizeof array / sizeof *array; i++) {
        char name[64];
        snprintf(name, sizeof name, "model.layers.%lld.%s.weight", (long long)layer, array[i].name);
        if (!llama_expect(f, name, array[i].rows, array[i].columns)) return false;
    }
    return true;
}

/* Compares config.json with the shapes in the files, before memory is taken for a model of config.json's sizes, which
   may be wrong and huge. */
static hpml_status llama_check_shapes(hpml_ctx *ctx, const char *folder, const llama_config *c)
{
    llama_files f;
    bool        fits = llama_open(&f, ctx, folder);
    fits = fits && llama_expect(&f, "model.embed_tokens.weight", c->vocabulary, c->width);
    for (int64_t i = 0; i < c->layers && fits; i++) fits = llama_expect_layer(&f, c, i);
    if (fits && !c->tied) llama_expect(&f, "lm_head.weight", c->vocabulary, c->width);
    hpml_safetensors_close(f.open);
    free(f.index.text);
    return hpml_ctx_status(ctx);
}

/* Loads the parameters of a model in several files, named in model.safetensors.index.json: each file has its own ones,
   and leaves the others as they are. */
static void llama_load_parts(hpml_ctx *ctx, const char *folder, const json_file *index)
{
    const int    n = hpml_param_count(ctx);
    const char **of = (const char **)calloc((size_t)n, sizeof *of); /* the file of each parameter, in the index */
    hpml_rename *others = (hpml_rename *)calloc((size_t)n, sizeof *others);
    if (!of || !others) hpml_ctx_fail(ctx, HPML_ERR_MEMORY, "%s: no memory", index->path);
    for (int i = 0; i < n && hpml_ctx_status(ctx) == HPML_OK; i++)
        of[i] = llama_file_of(index, hpml_param_at(ctx, i)->name);
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
    llama_files f;
    if (llama_open(&f, ctx, folder) && f.is_indexed) llama_load_parts(ctx, folder, &f.index);
    free(f.index.text);
    if (f.is_indexed) return hpml_ctx_status(ctx);
    snprintf(f.path, sizeof f.path, "%s/model.safetensors", folder);
    return hpml_params_load(ctx, f.path);
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
