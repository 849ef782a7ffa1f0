/* Writes a small model of the Llama family, for test_examples.sh: llama_files FOLDER llama|qwen2|mistral. Its numbers
   are functions of their array's name and their index, and exact in F32, BF16 and F16, so that the scores that
   transformers computes from these files can be kept in llama_golden.txt. The three kinds differ in all that
   examples/41_llama.c tells apart: types, biases, a tied head, heads of keys, sizes of heads, where rope_theta is, and
   the number of files. */
#include "../hpml.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { WIDTH = 32, INNER = 48, LAYERS = 2, HEADS = 4, VOCABULARY = 450, MOST = 40, NAME = 64 };

typedef struct kind {
    const char *name, *fields;
    hpml_dtype  dtype;
    int64_t     kv_heads, head_width;
    bool        bias, tied;
    int         files;
} kind;

static const kind kinds[] = {
    { "llama", "\"rms_norm_eps\": 1e-05, \"rope_scaling\": null, \"eos_token_id\": [2, 447]",
      HPML_DTYPE_F32, 2, WIDTH / HEADS, false, false, 1 },
    { "qwen2", "\"rms_norm_eps\": 1e-06, \"rope_parameters\": {\"rope_theta\": 1e6, \"rope_type\": \"default\"},\n"
      "  \"use_sliding_window\": false, \"sliding_window\": 2, \"bos_token_id\": 447, \"eos_token_id\": null",
      HPML_DTYPE_BF16, 1, WIDTH / HEADS, true, true, 1 },
    { "mistral", "\"rms_norm_eps\": 0.5, \"rope_theta\": 500.0, \"head_dim\": 12, \"sliding_window\": 16",
      HPML_DTYPE_F16, 2, 12, false, false, 2 } };

typedef struct model {
    hpml_ctx       *ctx;
    const kind     *k;
    char            name[MOST][NAME];
    hpml_safetensor array[MOST];
    int             count;
} model;

/* Adds an array of rows x columns or, with columns 0, of rows numbers. Those of norms are near 1. */
static void add(model *m, const char *prefix, const char *name, int64_t rows, int64_t columns)
{
    hpml_safetensor *a = &m->array[m->count];
    char            *full = m->name[m->count++];
    int64_t          n = columns > 0 ? rows * columns : rows;
    float           *x = (float *)malloc((size_t)n * sizeof *x);
    void            *data = malloc((size_t)n * hpml_dtype_size(m->k->dtype));
    uint32_t         seed = 2166136261u;
    snprintf(full, NAME, "%s%s", prefix, name);
    for (const char *p = full; *p; p++) seed = (seed ^ (unsigned char)*p) * 16777619u;
    for (int64_t i = 0; x && i < n; i++) {
        uint32_t h = (seed + (uint32_t)i) * 2654435761u;
        h = (h ^ h >> 15) * 2246822519u;
        const int number = (int)(h >> 24) - 128; /* -128 to 127 */
        x[i] = strstr(name, "norm") ? 1 + (float)(number / 2) / 128 : (float)number / 256;
    }
    hpml_convert(m->ctx, m->k->dtype, data, HPML_DTYPE_F32, x, n);
    free(x);
    a->name = full, a->dtype = m->k->dtype, a->data = data, a->ndim = columns > 0 ? 2 : 1;
    a->shape[0] = rows, a->shape[1] = columns, a->bytes = (size_t)n * hpml_dtype_size(a->dtype);
}

static void add_linear(model *m, const char *prefix, const char *name, int64_t out, int64_t in, bool bias)
{
    char part[NAME];
    snprintf(part, sizeof part, "%s.weight", name);
    add(m, prefix, part, out, in);
    snprintf(part, sizeof part, "%s.bias", name);
    if (bias) add(m, prefix, part, out, 0);
}

static void add_all(model *m)
{
    const int64_t queries = HEADS * m->k->head_width, keys = m->k->kv_heads * m->k->head_width;
    add(m, "", "model.embed_tokens.weight", VOCABULARY, WIDTH);
    for (int i = 0; i < LAYERS; i++) {
        char p[NAME / 2];
        snprintf(p, sizeof p, "model.layers.%d.", i);
        add(m, p, "input_layernorm.weight", WIDTH, 0);
        add_linear(m, p, "self_attn.q_proj", queries, WIDTH, m->k->bias);
        add_linear(m, p, "self_attn.k_proj", keys, WIDTH, m->k->bias);
        add_linear(m, p, "self_attn.v_proj", keys, WIDTH, m->k->bias);
        add_linear(m, p, "self_attn.o_proj", WIDTH, queries, false);
        add(m, p, "post_attention_layernorm.weight", WIDTH, 0);
        add_linear(m, p, "mlp.gate_proj", INNER, WIDTH, false);
        add_linear(m, p, "mlp.up_proj", INNER, WIDTH, false);
        add_linear(m, p, "mlp.down_proj", WIDTH, INNER, false);
    }
    add(m, "", "model.norm.weight", WIDTH, 0);
    if (!m->k->tied) add(m, "", "lm_head.weight", VOCABULARY, WIDTH);
}

static FILE *create(const char *folder, const char *name)
{
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return fopen(path, "w");
}

static bool write_config(const char *folder, const kind *k)
{
    FILE *f = create(folder, "config.json");
    if (!f) return false;
    fprintf(f, "{\n  \"model_type\": \"%s\", \"hidden_size\": %d,\n"
            "  \"intermediate_size\": %d, \"hidden_act\": \"silu\",\n"
            "  \"num_hidden_layers\": %d, \"num_attention_heads\": %d, \"num_key_value_heads\": %d,\n"
            "  \"vocab_size\": %d, \"max_position_embeddings\": 64, \"tie_word_embeddings\": %s,\n  %s\n}\n",
            k->name, WIDTH, INNER, LAYERS, HEADS, (int)k->kv_heads, VOCABULARY, k->tied ? "true" : "false", k->fields);
    return fclose(f) == 0;
}

/* Writes model.safetensors or, for two files, every other array to each, and the index. */
static bool write_arrays(const char *folder, model *m)
{
    const hpml_meta format = { "format", "pt" };
    FILE           *index = m->k->files > 1 ? create(folder, "model.safetensors.index.json") : NULL;
    for (int i = 0; i < m->k->files; i++) {
        char            name[64] = "model.safetensors", path[1024];
        hpml_safetensor part[MOST];
        int             count = 0;
        if (index) snprintf(name, sizeof name, "model-%05d-of-%05d.safetensors", i + 1, m->k->files);
        snprintf(path, sizeof path, "%s/%s", folder, name);
        for (int a = i; a < m->count; a += m->k->files, count++) {
            part[count] = m->array[a];
            if (!index) continue;
            fprintf(index, "%s\"%s\": \"%s\"", i + count > 0 ? ",\n" : "{\"metadata\": {}, \"weight_map\": {\n",
                    m->array[a].name, name);
        }
        hpml_safetensors_save(m->ctx, path, part, count, &format, 1);
    }
    if (index && (fprintf(index, "}}\n") < 0 || fclose(index) != 0)) return false;
    return hpml_ctx_status(m->ctx) == HPML_OK;
}

int main(int argc, char **argv)
{
    static model m;
    for (size_t i = 0; argc == 3 && i < sizeof kinds / sizeof kinds[0]; i++)
        if (strcmp(kinds[i].name, argv[2]) == 0) m.k = &kinds[i];
    if (!m.k) return fprintf(stderr, "llama_files FOLDER llama|qwen2|mistral\n"), 2;
    mkdir(argv[1], 0777);
    m.ctx = hpml_ctx_create(NULL);
    add_all(&m);
    bool good = write_config(argv[1], m.k) && write_arrays(argv[1], &m);
    if (hpml_ctx_status(m.ctx) != HPML_OK) fprintf(stderr, "%s\n", hpml_ctx_error(m.ctx));
    for (int i = 0; i < m.count; i++) free((void *)(uintptr_t)m.array[i].data);
    hpml_ctx_free(m.ctx);
    return !good;
}
