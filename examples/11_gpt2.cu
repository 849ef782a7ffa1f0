/* What you learn: training a real language model, GPT-2 with 124 M parameters, on one GPU, and how much of the GPU's
   peak it uses (>>gpu-tour of hpml_cuda.cuh follows one step). Difficulty 3 of 4.
   nvcc -O2 -arch=native examples/11_gpt2.cu -lcublasLt -lcudnn -o gpt2
   ./gpt2 [--tokens FILE] [--weights model.safetensors] [--profile]; --help lists all options
   --tokens: 16-bit tokens, bare or with llm.c's header; any other file is read as bytes (default: hpml.h).
   --weights: GPT-2's as published in safetensors; without, random ones. Prints loss, tokens/s and MFU: the part of the
   GPU's peak that is the model's own arithmetic, 6 parameters + 12 layers width context for each token; at the end the
   counts of hpml_cuda_text and, with --profile, the GPU's time for each layer. */
#define HPML_IMPLEMENTATION
#include "../hpml_cuda.cuh"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "gpt2.h" /* reads tokens and weights */
#include "options.h"

typedef struct options {
    const char *tokens, *weights, *save, *precision;
    int64_t     steps, batch, context, layers, width, heads, vocabulary;
    double      lr, peak;
    int         json, profile;
} options;

static int parse(options *o, int argc, char **argv)
{
    const option table[] = {
        { "--tokens", OPTION_TEXT, &o->tokens, "FILE", "16-bit tokens, or any file as bytes (hpml.h)" },
        { "--weights", OPTION_TEXT, &o->weights, "FILE", "GPT-2's model.safetensors (random weights)" },
        { "--steps", OPTION_COUNT, &o->steps, "N", "steps of training (100)" },
        { "--batch", OPTION_COUNT, &o->batch, "N", "windows of tokens in a step (8)" },
        { "--context", OPTION_COUNT, &o->context, "N", "tokens in a window (1024)" },
        { "--layers", OPTION_COUNT, &o->layers, "N", "transformer blocks (12)" },
        { "--width", OPTION_COUNT, &o->width, "N", "numbers for each token (768)" },
        { "--heads", OPTION_COUNT, &o->heads, "N", "attention heads (12)" },
        { "--lr", OPTION_REAL, &o->lr, "X", "learning rate (0.0006)" },
        { "--precision", OPTION_CHOICE, &o->precision, "f32|tf32|bf16|f16", "how the GPU computes (bf16)" },
        { "--peak", OPTION_REAL, &o->peak, "X", "TFLOP/s of the card (known for some)" },
        { "--save", OPTION_TEXT, &o->save, "FILE", "writes a checkpoint at the end" },
        { "--profile", OPTION_FLAG, &o->profile, NULL, "GPU time by layer, of three more steps" },
        { "--json", OPTION_FLAG, &o->json, NULL, "a JSON object as last line" } };
    return options_read("Trains GPT-2 on one GPU.", table, sizeof table / sizeof *table, argc, argv);
}

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

static hpml_tensor *block(hpml_tensor *x, const options *o, int64_t layer) /* (B, T, C) */
{
    char                name[6][64];
    const char *const   parts[6] = { "ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj" };
    float               small = 0.02f / sqrtf(2 * (float)o->layers); /* residual branches start small */
    hpml_attention_desc heads = {};
    heads.heads = (int32_t)o->heads;
    for (int i = 0; i < 6; i++) snprintf(name[i], sizeof name[i], "h.%d.%s", (int)layer, parts[i]);
    hpml_tensor *a = linear(norm(x, name[0]), 3 * o->width, name[1], 0.02f, HPML_ACT_NONE); /* (B, T, 3C) */
    x = hpml_add(x, linear(hpml_attention(a, &heads), o->width, name[2], small, HPML_ACT_NONE));
    a = linear(norm(x, name[3]), 4 * o->width, name[4], 0.02f, HPML_ACT_GELU);               /* (B, T, 4C) */
    return hpml_add(x, linear(a, o->width, name[5], small, HPML_ACT_NONE));
}

static hpml_tensor *record_model(hpml_ctx *ctx, const options *o, hpml_tensor *tokens) /* (B, T) -> (B, T, V) */
{
    hpml_embedding_desc table = {};
    hpml_linear_desc    head  = {};
    hpml_param_desc     place = {};
    table.name = "wte", table.init = HPML_INIT_NORMAL, table.init_scale = 0.02f;
    place.name = "wpe.weight", place.init = HPML_INIT_NORMAL, place.init_scale = 0.02f;
    place.ndim = 2, place.shape[0] = o->context, place.shape[1] = o->width;
    hpml_tensor *x = hpml_embedding(tokens, o->vocabulary, o->width, &table);
    x = hpml_add(x, hpml_param_create(ctx, &place));
    for (int64_t i = 0; i < o->layers; i++) x = block(x, o, i);
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
    if (i->step % 10 == 0 || i->step == 1)
        printf("step %lld  loss %.4f  norm %.3f  %.0f tokens/s  MFU %.1f %%\n", (long long)i->step, (double)i->loss,
               (double)i->grad_norm, m->tokens_per_second, 100 * m->mfu), fflush(stdout);
    return 0;
}

/* Prints the counts of hpml_cuda_text, and the GPU's time for each layer, in three more steps that are not recorded. */
static int report(hpml_ctx *ctx, const options *o, hpml_trainer *t, hpml_dataset *data)
{
    static char   text[65536];
    hpml_fit_desc fit = {};
    hpml_cuda_text(ctx, text, sizeof text);
    printf("%s\n", text);
    if (!o->profile) return 0;
    hpml_profile_enable(hpml_trainer_graph(t), true);
    fit.epochs = INT32_MAX, fit.max_steps = 3;
    if (hpml_trainer_fit(t, data, &fit) != HPML_OK) return 1;
    hpml_profile_text(hpml_trainer_graph(t), text, sizeof text);
    printf("%s", text);
    return 0;
}

static int train(hpml_ctx *ctx, options *o, const char *device)
{
    hpml_dataset     *data = load_tokens(ctx, o->tokens, o->context);
    hpml_trainer_desc d    = {};
    hpml_fit_desc     fit  = {};
    meter             m    = {};
    hpml_memory       need;
    d.input  = hpml_input_tokens(ctx, o->batch, o->context);
    d.output = record_model(ctx, o, d.input);
    d.optimizer = HPML_OPT_ADAMW, d.lr = (float)o->lr, d.beta2 = 0.95f, d.weight_decay = 0.1f, d.clip_norm = 1;
    d.schedule.kind = HPML_SCHEDULE_COSINE, d.schedule.warmup_steps = o->steps / 10, d.schedule.total_steps = o->steps;
    hpml_trainer *t = data ? hpml_trainer_create(ctx, &d) : NULL;
    if (!t) return 1;
    if (o->weights) {
        hpml_safetensors *f = hpml_safetensors_open(ctx, o->weights);
        for (int i = 0; f && i < hpml_param_count(ctx) && hpml_ctx_status(ctx) == HPML_OK; i++)
            load_one(ctx, f, hpml_param_at(ctx, i));
        hpml_safetensors_close(f);
        if (hpml_ctx_status(ctx) != HPML_OK) return 1;
    }
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

int main(int argc, char **argv)
{
    static const char *const names[] = { "f32", "tf32", "bf16", "f16" };
    /* TFLOP/s of dense bf16, from NVIDIA's data sheets */
    static const struct { const char *name; double peak; } cards[] = {
        { "H100", 989 }, { "H200", 989 }, { "A100", 312 }, { "B200", 2250 }, { "L40S", 362 }, { "RTX 4090", 165 } };
    options        o    = {};
    hpml_cuda_desc gpu  = {};
    hpml_cuda_info info = {};
    hpml_ctx_desc  desc = {};
    o.tokens = "hpml.h", o.precision = "bf16", o.lr = 6e-4, o.vocabulary = 50304;
    o.steps = 100, o.batch = 8, o.context = 1024, o.layers = 12, o.width = 768, o.heads = 12;
    int p = 0, failed = parse(&o, argc, argv);
    if (failed) return failed == 1 ? 0 : failed;
    while (strcmp(names[p], o.precision) != 0) p++;
    hpml_cuda_device_info(0, &info);
    for (size_t i = 0; i < sizeof cards / sizeof cards[0]; i++)
        if (o.peak == 0 && strstr(info.name, cards[i].name)) o.peak = cards[i].peak;
    gpu.precision = (hpml_cuda_precision)p;
    desc.backend = hpml_backend_cuda(), desc.backend_desc = &gpu, desc.seed = 1;
    hpml_ctx *ctx = hpml_ctx_create(&desc);
    failed = hpml_ctx_status(ctx) != HPML_OK || train(ctx, &o, info.name);
    if (hpml_ctx_status(ctx) != HPML_OK) fprintf(stderr, "error: %s\n", hpml_ctx_error(ctx)), failed = 1;
    hpml_ctx_free(ctx);
    return failed;
}
