/* What you learn: prediction in a device with a fixed memory: no threads, no malloc, and the need known beforehand.
   Difficulty 2 of 4.
   cc -O2 -DHPML_NO_THREADS examples/27_static_memory.c -o static_memory -lm && ./static_memory
   A first part, on the "workstation", trains a small net and saves its parameters. A second part, on the "device", has
   all its memory in one static array: it records the same model, asks how many bytes it needs, loads the parameters and
   predicts. The allocator hands out the array from its start and counts its calls; predictions make none.
   prints   a line for what a plan needs and what the context took, "0 allocations during 1000 predictions", and the
            answer to each case of the exclusive or: 0 1 1 0 */
#define HPML_IMPLEMENTATION
#include "../hpml.h"
#include <stdio.h>
#include <string.h>

#define MODEL "build/xor.safetensors"

/* The device's memory, and an allocator that never takes anything back: all that the context needs stays. */
static unsigned char arena[48 << 10] __attribute__((aligned(64)));
static size_t        arena_used, arena_calls;

static void *arena_alloc(size_t size, size_t align, void *user)
{
    size_t from = (arena_used + align - 1) / align * align;
    (void)user;
    arena_calls++;
    if (size > sizeof arena - from) return NULL; /* the library's error then says what was needed */
    arena_used = from + size;
    return arena + from;
}
static void arena_free(void *p, size_t size, void *user) { (void)p, (void)size, (void)user; }

static const float   cases[8]   = { 0, 0, 0, 1, 1, 0, 1, 1 };
static const int32_t answers[4] = { 0, 1, 1, 0 };

/* The model, recorded in the same way on both machines; names are those in the file. */
static hpml_tensor *model(hpml_tensor *x)
{
    hpml_linear_desc hidden = { .name = "hidden" }, out = { .name = "out" };
    return hpml_linear(hpml_tanh(hpml_linear(x, 8, &hidden)), 2, &out); /* (B, 2) */
}

static hpml_status train_and_save(void)
{
    hpml_ctx         *ctx  = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 1, .threads = 1, .log = hpml_log_stderr });
    hpml_tensor      *x    = hpml_input_2d(ctx, 4, 2);
    hpml_trainer_desc desc = { .input = x, .output = model(x), .lr = 0.5f };
    hpml_trainer     *t    = hpml_trainer_create(ctx, &desc);
    for (int step = 0; step < 500; step++) hpml_trainer_step(t, cases, answers, 4, NULL);
    hpml_params_save(ctx, MODEL, HPML_DTYPE_F32);
    hpml_status status = hpml_ctx_status(ctx);
    hpml_ctx_free(ctx);
    return status;
}

static hpml_status predict(hpml_ctx *ctx)
{
    hpml_tensor    *x = hpml_input_2d(ctx, 4, 2), *y = model(x);
    hpml_graph_desc d = { .output_count = 1, .outputs = &y, .predict = true };
    hpml_graph     *g = hpml_graph_create(ctx, &d);
    hpml_memory     need;
    float           score[8] = { 0 }; /* (4, 2) */
    hpml_graph_memory(g, &need);
    hpml_graph_alloc(g);
    if (hpml_params_load(ctx, MODEL) != HPML_OK) return hpml_ctx_status(ctx);
    printf("the plan needs %zu bytes; the context took %zu of %zu\n", need.total, arena_used, sizeof arena);
    hpml_tensor_set(x, cases, 8);
    size_t calls = arena_calls;
    for (int i = 0; i < 1000; i++) hpml_graph_forward(g, false, 0);
    printf("%zu allocations during 1000 predictions\n", arena_calls - calls);
    hpml_tensor_get(y, score, 8);
    for (int i = 0; i < 4; i++) printf("%d%c", score[2 * i + 1] > score[2 * i], i < 3 ? ' ' : '\n');
    return hpml_ctx_status(ctx);
}

int main(void)
{
    hpml_ctx_desc desc = { .threads = 1, .cpu = "scalar", .log = hpml_log_stderr,
                           .allocator = { .alloc = arena_alloc, .free = arena_free } };
    if (train_and_save() != HPML_OK) return 1;
    hpml_ctx   *ctx    = hpml_ctx_create(&desc);
    hpml_status status = predict(ctx);
    hpml_ctx_free(ctx);
    return status != HPML_OK;
}
