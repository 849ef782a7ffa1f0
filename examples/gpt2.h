/* For 11_gpt2.cu: its options; reads GPT-2's published weights and files of tokens; draws and prints tokens. */
#ifndef HPML_GPT2_H
#define HPML_GPT2_H

#include "bpe.h"
#include "options.h"
#include <math.h>

typedef struct options {
    const char *tokens, *weights, *save, *precision, *folder, *prompt;
    int64_t     steps, batch, context, layers, width, heads, vocabulary, length, top_k, seed;
    double      lr, peak, temperature;
    int         json, profile, cpu, check, no_tune;
    bpe        *words;      /* NULL: a byte is a token */
} options;

/* As options_read; sets defaults first. */
static int parse(options *o, int argc, char **argv)
{
    int failed;
    o->tokens = "hpml.h", o->lr = 6e-4, o->temperature = 1, o->top_k = 40, o->length = 64, o->seed = 1;
    o->steps = 100, o->batch = 8, o->context = 1024, o->layers = 12, o->width = 768, o->heads = 12;
    const option table[] = {
        { "--cpu", OPTION_FLAG, &o->cpu, NULL, "computes on the CPU, in f32" },
        { "--tokens", OPTION_TEXT, &o->tokens, "FILE", "16-bit tokens, or any file as text (hpml.h)" },
        { "--weights", OPTION_TEXT, &o->weights, "FILE", "GPT-2's model.safetensors (random weights)" },
        { "--bpe", OPTION_TEXT, &o->folder, "FOLDER", "of vocab.json and merges.txt (tokens are bytes)" },
        { "--steps", OPTION_COUNT, &o->steps, "N", "steps of training; 0: none (100)" },
        { "--batch", OPTION_COUNT, &o->batch, "N", "windows of tokens in a step (8)" },
        { "--context", OPTION_COUNT, &o->context, "N", "tokens in a window (1024)" },
        { "--layers", OPTION_COUNT, &o->layers, "N", "transformer blocks (12)" },
        { "--width", OPTION_COUNT, &o->width, "N", "numbers for each token (768)" },
        { "--heads", OPTION_COUNT, &o->heads, "N", "attention heads (12)" },
        { "--vocabulary", OPTION_COUNT, &o->vocabulary, "N", "tokens (the files', or GPT-2's 50304)" },
        { "--lr", OPTION_REAL, &o->lr, "X", "learning rate (0.0006)" },
        { "--precision", OPTION_CHOICE, &o->precision, "f32|tf32|bf16|f16", "how the GPU computes (bf16)" },
        { "--no-tune", OPTION_FLAG, &o->no_tune, NULL, "cuBLASLt's first products: the same bits each time" },
        { "--peak", OPTION_REAL, &o->peak, "X", "TFLOP/s of the card (known for some)" },
        { "--save", OPTION_TEXT, &o->save, "FILE", "writes a checkpoint at the end" },
        { "--profile", OPTION_FLAG, &o->profile, NULL, "GPU time by layer, of three more steps" },
        { "--prompt", OPTION_TEXT, &o->prompt, "TEXT", "goes on with this text at the end" },
        { "--length", OPTION_COUNT, &o->length, "N", "tokens of that text (64)" },
        { "--temperature", OPTION_REAL, &o->temperature, "X", "0: always the likeliest token (1)" },
        { "--top-k", OPTION_COUNT, &o->top_k, "N", "draws from the likeliest N tokens; 0: all (40)" },
        { "--check", OPTION_FLAG, &o->check, NULL, "compares with a pass over the whole text" },
        { "--seed", OPTION_COUNT, &o->seed, "N", "of everything random (1)" },
        { "--json", OPTION_FLAG, &o->json, NULL, "a JSON object as last line of the training" } };
    failed = options_read("Trains GPT-2 on one GPU, and generates text.", table, sizeof table / sizeof *table, argc,
                          argv);
    if (failed) return failed;
    if (o->batch < 1 || o->context < 1 || o->width < 1 || o->heads < 1 || o->width % o->heads != 0)
        return fprintf(stderr, "--batch, --context, --width, --heads: at least 1; --heads divides --width\n"), 2;
    if (o->prompt && o->weights && !o->folder)
        return fprintf(stderr, "--prompt with --weights needs --bpe, the folder of vocab.json and merges.txt\n"), 2;
    return 0;
}

#ifdef HPML_CUDA_BODY /* nvcc compiles, or has compiled another file with the body of hpml_cuda.cuh */
static void use_gpu(options *o, hpml_ctx_desc *d, hpml_cuda_desc *gpu, hpml_cuda_info *info)
{
    static const char *const names[] = { "f32", "tf32", "bf16", "f16" };
    /* TFLOP/s of dense bf16, from NVIDIA's data sheets */
    static const struct { const char *name; double peak; } cards[] = {
        { "H100", 989 }, { "H200", 989 }, { "A100", 312 }, { "B200", 2250 }, { "L40S", 362 }, { "RTX 4090", 165 } };
    int p = 0;
    if (!o->precision) o->precision = "bf16";
    while (strcmp(names[p], o->precision) != 0) p++;
    hpml_cuda_device_info(0, info);
    for (size_t i = 0; i < sizeof cards / sizeof cards[0]; i++)
        if (o->peak == 0 && strstr(info->name, cards[i].name)) o->peak = cards[i].peak;
    gpu->precision = (hpml_cuda_precision)p;
    gpu->tune      = !o->no_tune;
    d->backend = hpml_backend_cuda(), d->backend_desc = gpu;
}

static void print_counts(hpml_ctx *ctx)
{
    char counts[1024];
    hpml_cuda_text(ctx, counts, sizeof counts);
    printf("%s\n", counts);
}
#else /* a C++ compiler: the GPU's functions are declared, but not there */
static void use_gpu(options *o, hpml_ctx_desc *, hpml_cuda_desc *, hpml_cuda_info *) { o->cpu = 1; }
static void print_counts(hpml_ctx *) {}
#endif

/* Chooses where the model computes, and in which precision; returns 2 after a message if that is not possible. */
static int choose_device(options *o, hpml_ctx_desc *d, hpml_cuda_desc *gpu, hpml_cuda_info *info)
{
    if (!o->cpu) use_gpu(o, d, gpu, info);
    if (!o->cpu) return 0;
    if (o->precision && strcmp(o->precision, "f32") != 0)
        return fprintf(stderr, "--precision %s: on the CPU f32 only\n", o->precision), 2;
    o->precision = "f32";
    snprintf(info->name, sizeof info->name, "CPU");
    return 0;
}

/* Finds an array by its name, which files begin with "transformer." or not. */
static bool find_array(const hpml_safetensors *f, const char *name, hpml_safetensor *e)
{
    char other[256];
    snprintf(other, sizeof other, "transformer.%s", name);
    return hpml_safetensors_find(f, name, e) || hpml_safetensors_find(f, other, e);
}

/* Loads one published array into parameter p. Weights of products are (in, out) in the file and (out, in) in the
   model; a model with fewer positions than the file takes the first ones. */
static hpml_status load_one(hpml_ctx *ctx, const hpml_safetensors *f, hpml_tensor *p)
{
    hpml_safetensor e;
    bool            turned = strstr(p->name, ".c_") && p->ndim == 2;
    int64_t         n = hpml_tensor_count(p), rows = p->shape[0], cols = p->ndim > 1 ? p->shape[1] : 1;
    if (!find_array(f, p->name, &e))
        return hpml_ctx_fail(ctx, HPML_ERR_FORMAT, "the weights have no \"%s\"", p->name);
    bool fits = e.ndim == p->ndim && e.shape[0] == (turned ? cols : rows);
    if (strcmp(p->name, "wpe.weight") == 0) fits = e.ndim == 2 && e.shape[0] >= rows;
    if (!fits || (e.ndim > 1 && e.shape[1] != (turned ? rows : cols)))
        return hpml_ctx_fail(ctx, HPML_ERR_SHAPE, "\"%s\": the file has %lldx%lld, the model %lldx%lld", p->name,
                             (long long)e.shape[0], (long long)e.shape[1], (long long)rows, (long long)cols);
    float *raw = (float *)malloc((size_t)n * sizeof(float));
    float *w = turned ? (float *)malloc((size_t)n * sizeof(float)) : raw;
    if (raw && w) {
        hpml_convert(ctx, HPML_DTYPE_F32, raw, e.dtype, e.data, n);
        for (int64_t i = 0; turned && i < n; i++) w[i % rows * cols + i / rows] = raw[i];
        hpml_tensor_set(p, w, n);
    }
    if (turned) free(w);
    free(raw);
    return hpml_ctx_status(ctx);
}

/* Loads all parameters of the context. */
static hpml_status load_weights(hpml_ctx *ctx, const char *path)
{
    hpml_safetensors *f = hpml_safetensors_open(ctx, path);
    for (int i = 0; f && i < hpml_param_count(ctx) && hpml_ctx_status(ctx) == HPML_OK; i++)
        load_one(ctx, f, hpml_param_at(ctx, i));
    hpml_safetensors_close(f);
    return hpml_ctx_status(ctx);
}

/* The number of tokens of the model: as in the weights' file; else `asked`; if that is 0, that of `words` or GPT-2's
   50,257, rounded up to a multiple of 64, because products are faster then. The rows in excess learn that no text has
   their tokens. */
static int64_t vocabulary_size(hpml_ctx *ctx, const char *weights, const bpe *words, int64_t asked)
{
    hpml_safetensors *f = weights ? hpml_safetensors_open(ctx, weights) : NULL;
    hpml_safetensor   e;
    int64_t           least = words ? words->count : 256, n = asked;
    if (n == 0) n = ((words ? least : 50257) + 63) / 64 * 64;
    if (f && find_array(f, "wte.weight", &e)) n = e.shape[0];
    hpml_safetensors_close(f);
    if (n < least && hpml_ctx_status(ctx) == HPML_OK)
        hpml_ctx_fail(ctx, HPML_ERR_ARGUMENT, "a vocabulary of %lld tokens; the text has up to %lld", (long long)n,
                      (long long)least);
    return n;
}

/* Loads the tokenizer of a folder; NULL: the context has an error. */
static bpe *load_bpe(hpml_ctx *ctx, const char *folder)
{
    char path[2][1024], error[1200];
    snprintf(path[0], sizeof path[0], "%s/vocab.json", folder);
    snprintf(path[1], sizeof path[1], "%s/merges.txt", folder);
    bpe *b = bpe_load(path[0], path[1], error, sizeof error);
    if (!b) hpml_ctx_fail(ctx, HPML_ERR_FORMAT, "%s", error);
    return b;
}

/* Converts a text to tokens, by `words` or, if that is NULL, one for each byte. Returns how many; -1: no memory. */
static int64_t text_tokens(const bpe *words, const char *text, size_t bytes, int32_t *ids)
{
    if (words) return bpe_encode(words, text, bytes, ids);
    for (size_t i = 0; i < bytes; i++) ids[i] = (unsigned char)text[i];
    return (int64_t)bytes;
}

static void print_token(const bpe *words, int32_t id)
{
    size_t               length = 1;
    const unsigned char  byte = (unsigned char)id, *bytes = words ? bpe_bytes(words, id, &length) : &byte;
    if (bytes) fwrite(bytes, 1, length, stdout);
    fflush(stdout);
}

/* Draws one of n tokens with probabilities proportional to exp(score / temperature), from the top_k tokens with the
   highest scores (0: from all). temperature 0: the token with the highest score. */
static int32_t draw_token(hpml_rng *rng, const float *scores, int64_t n, double temperature, int64_t top_k)
{
    int64_t kept = top_k > 0 && top_k < n ? top_k : n, count = 0, most = 0;
    float  *best = temperature > 0 && kept < n ? (float *)malloc((size_t)kept * sizeof *best) : NULL;
    double  sum = 0, pick, least = -INFINITY;
    for (int64_t i = 0; best && i < n; i++) { /* the `kept` highest scores, in falling order */
        int64_t at = count < kept ? count : kept - 1;
        if (count == kept && !(scores[i] > best[at])) continue;
        for (; at > 0 && best[at - 1] < scores[i]; at--) best[at] = best[at - 1];
        best[at] = scores[i];
        if (count < kept) count++;
    }
    if (best) least = (double)best[kept - 1];
    free(best);
    for (int64_t i = 1; i < n; i++)
        if (scores[i] > scores[most]) most = i;
    if (!(temperature > 0)) return (int32_t)most;
    for (int64_t i = 0; i < n; i++)
        if ((double)scores[i] >= least) sum += exp((double)(scores[i] - scores[most]) / temperature);
    pick = (double)hpml_rng_uniform(rng) * sum;
    for (int64_t i = 0; i < n; i++) {
        if ((double)scores[i] < least) continue;
        pick -= exp((double)(scores[i] - scores[most]) / temperature);
        if (pick < 0) return (int32_t)i;
    }
    return (int32_t)most;
}

/* Reads a whole file; NULL: `size` is 0, and the context has an error. */
static char *load_file(hpml_ctx *ctx, const char *path, size_t *size)
{
    FILE *file = fopen(path, "rb");
    char *raw  = NULL;
    long  end  = file && fseek(file, 0, SEEK_END) == 0 ? ftell(file) : -1;
    *size = 0;
    if (end >= 0 && end < INT32_MAX) rewind(file), raw = (char *)malloc((size_t)end + 1);
    if (raw && fread(raw, 1, (size_t)end, file) == (size_t)end) *size = (size_t)end;
    if (file) fclose(file);
    if (*size > 0) return raw;
    hpml_ctx_fail(ctx, HPML_ERR_READ, "%s: cannot be read, is empty or has 2 GB or more", path);
    free(raw);
    return NULL;
}

/* Loads samples of T tokens, labelled with the tokens that follow: 16-bit tokens, bare (.bin) or with llm.c's header;
   any other file is a text. V: number of tokens of the model. */
static hpml_dataset *load_tokens(hpml_ctx *ctx, const char *path, int64_t T, const bpe *words, int64_t V)
{
    size_t        size, end = strlen(path), skip = 0;
    char         *raw = load_file(ctx, path, &size);
    int32_t       magic = 0, *ids = raw ? (int32_t *)malloc(size * sizeof *ids) : NULL;
    int64_t       count = 0, samples;
    hpml_dataset *d = NULL;
    if (size >= 1024) memcpy(&magic, raw, 4);
    if (magic == 20240520) skip = 1024;
    if (ids && (skip || (end > 4 && strcmp(path + end - 4, ".bin") == 0)))
        for (; skip + 2 * (size_t)count + 1 < size; count++)
            ids[count] = (unsigned char)raw[skip + 2 * (size_t)count] |
                         (unsigned char)raw[skip + 2 * (size_t)count + 1] << 8;
    else if (ids) count = text_tokens(words, raw, size, ids);
    free(raw);
    samples = (count - 1) / T;
    if (samples < 1)
        hpml_ctx_fail(ctx, HPML_ERR_READ, "%s: holds %lld tokens, expected more than --context %lld", path,
                      (long long)count, (long long)T);
    for (int64_t i = 0; i < count && hpml_ctx_status(ctx) == HPML_OK; i++)
        if (ids[i] >= V)
            hpml_ctx_fail(ctx, HPML_ERR_FORMAT, "%s: token %lld is %d; the model has %lld tokens", path, (long long)i,
                          (int)ids[i], (long long)V);
    if (hpml_ctx_status(ctx) == HPML_OK)
        d = hpml_dataset_create(ctx, samples, HPML_DTYPE_I32, 1, &T, ids, HPML_DTYPE_I32, T, ids + 1);
    free(ids);
    return d;
}

#endif
