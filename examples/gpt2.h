/* Readers of 11_gpt2.cu: GPT-2's published weights, and files of tokens. */
#ifndef HPML_GPT2_H
#define HPML_GPT2_H

/* Loads one published array into parameter p. Weights of products are (in, out) in the file and (out, in) in the
   model; the model pads the vocabulary to a multiple of 64. */
static hpml_status load_one(hpml_ctx *ctx, const hpml_safetensors *f, hpml_tensor *p)
{
    char            other[256];
    hpml_safetensor e;
    bool            turned = strstr(p->name, ".c_") && p->ndim == 2;
    int64_t         n = hpml_tensor_count(p), rows = p->shape[0], cols = p->ndim > 1 ? p->shape[1] : 1;
    snprintf(other, sizeof other, "transformer.%s", p->name);
    if (!hpml_safetensors_find(f, p->name, &e) && !hpml_safetensors_find(f, other, &e))
        return hpml_ctx_fail(ctx, HPML_ERR_FORMAT, "the weights have no \"%s\"", p->name);
    int64_t have = 1;
    for (int i = 0; i < e.ndim; i++) have *= e.shape[i];
    if (e.ndim != p->ndim || have > n || (turned ? e.shape[0] != cols || e.shape[1] != rows : have % cols != 0))
        return hpml_ctx_fail(ctx, HPML_ERR_SHAPE, "\"%s\": the file has %lldx%lld, the model %lldx%lld", p->name,
                             (long long)e.shape[0], (long long)e.shape[1], (long long)rows, (long long)cols);
    float *raw = (float *)calloc((size_t)n, sizeof(float));
    float *w = turned ? (float *)malloc((size_t)n * sizeof(float)) : raw;
    if (raw && w) {
        hpml_convert(ctx, HPML_DTYPE_F32, raw, e.dtype, e.data, have);
        for (int64_t i = 0; turned && i < n; i++) w[i % rows * cols + i / rows] = raw[i];
        hpml_tensor_set(p, w, n);
    }
    if (turned) free(w);
    free(raw);
    return hpml_ctx_status(ctx);
}

/* Loads samples of T tokens, labelled with the tokens that follow: 16-bit tokens, bare (.bin) or with llm.c's header;
   any other file is read as bytes. */
static hpml_dataset *load_tokens(hpml_ctx *ctx, const char *path, int64_t T)
{
    FILE          *file = fopen(path, "rb");
    unsigned char *raw  = NULL;
    long           size = 0;
    if (file && fseek(file, 0, SEEK_END) == 0)
        size = ftell(file), rewind(file), raw = (unsigned char *)malloc((size_t)size + 1);
    bool    read = raw && fread(raw, 1, (size_t)size, file) == (size_t)size;
    int32_t magic = 0;
    if (file) fclose(file);
    if (read && size >= 1024) memcpy(&magic, raw, 4);
    size_t      end   = strlen(path);
    bool        words = magic == 20240520 || (end > 4 && strcmp(path + end - 4, ".bin") == 0);
    int64_t     skip = magic == 20240520 ? 1024 : 0, count = (size - skip) / (words ? 2 : 1), samples = (count - 1) / T;
    int32_t    *x = read && samples > 0 ? (int32_t *)malloc((size_t)(2 * samples * T) * sizeof *x) : NULL;
    int32_t    *y = x ? x + samples * T : NULL;
    hpml_dataset *d = NULL;
    for (int64_t i = 0; x && i <= samples * T; i++) {
        int32_t token = words ? raw[skip + 2 * i] | raw[skip + 2 * i + 1] << 8 : raw[i];
        if (i < samples * T) x[i] = token;
        if (i > 0) y[i - 1] = token;
    }
    if (x) d = hpml_dataset_create(ctx, samples, HPML_DTYPE_I32, 1, &T, x, HPML_DTYPE_I32, T, y);
    else
        hpml_ctx_fail(ctx, HPML_ERR_READ, "%s: cannot be read, or holds less than %lld tokens", path, (long long)T + 1);
    free(x);
    free(raw);
    return d;
}

#endif
