/* A tour of contexts, tensors and random numbers: what is true after each call. Difficulty 1 of 4.
   cc -O2 examples/tour/1_tensors.c -o tensors -lm -lpthread && ./tensors
   prints the conditions that hold, and WRONG before one that does not; exits with 1 then. */
#define HPML_IMPLEMENTATION
#include "../../hpml.h"
#include "tour.h"
#include <stdlib.h>
#include <string.h>

/* A context counts what it has; memory made through it is freed with it, or earlier. */
static void contexts(hpml_ctx *ctx)
{
    hpml_progress none   = hpml_ctx_progress(ctx, (hpml_progress){ NULL, NULL }); /* the callback of long saves */
    size_t        before = hpml_ctx_bytes(ctx), calls = hpml_ctx_allocations(ctx);
    float        *mine   = (float *)hpml_ctx_alloc(ctx, 4000, NULL);
    SHOW(hpml_version() == HPML_VERSION);
    SHOW(hpml_ctx_seed(ctx) == 7 && hpml_ctx_threads(ctx) == 1 && none.fn == NULL);
    SHOW(mine && mine[999] == 0 && (uintptr_t)mine % 64 == 0);
    SHOW(hpml_ctx_bytes(ctx) >= before + 4000 && hpml_ctx_allocations(ctx) > calls);
    hpml_ctx_release(ctx, mine);
    SHOW(hpml_ctx_bytes(ctx) == before);
    SHOW(hpml_ctx_allocator(ctx).alloc != NULL);
    SHOW(hpml_ctx_backend(ctx) == hpml_backend_cpu() && hpml_ctx_device(ctx) != NULL);
}

/* The first error stays; calls after it do nothing, so a program may check once. */
static void errors(hpml_ctx *ctx)
{
    hpml_tensor *a = hpml_input_2d(ctx, 4, 3), *b = hpml_input_2d(ctx, 4, 5);
    SHOW(hpml_add(a, b) == NULL);
    SHOW(hpml_ctx_status(ctx) == HPML_ERR_SHAPE);
    SHOW(strcmp(hpml_status_string(HPML_ERR_SHAPE), "shapes do not fit") == 0);
    SHOW(strstr(hpml_ctx_error(ctx), "add: f32 4x3") != NULL);
    SHOW(hpml_relu(hpml_add(a, a)) == NULL); /* NULL until the error is cleared */
    hpml_ctx_clear_error(ctx);
    SHOW(hpml_add(a, a) != NULL);
}

/* Tensors with memory of their own; views share it. */
static void tensors(hpml_ctx *ctx)
{
    const int64_t shape[2]  = { 2, 3 }, six[1] = { -1 };
    const float   values[6] = { 1, 2, 3, 4, 5, 6 };
    float         back[6];
    uint16_t      half[6];
    char          text[80];
    hpml_tensor  *x    = hpml_tensor_create_2d(ctx, 2, 3), *flat = NULL, *turned = NULL, *column = NULL;
    hpml_tensor  *bf16 = hpml_tensor_create(ctx, HPML_DTYPE_BF16, 2, shape);
    hpml_tensor_set(x, values, 6);
    flat   = hpml_view_reshape(x, 1, six);
    turned = hpml_view_transpose(x, 0, 1);
    column = hpml_view_slice(x, 1, 2, 1);
    SHOW(flat->ndim == 1 && flat->shape[0] == 6 && flat->data == x->data);
    SHOW(turned->shape[0] == 3 && turned->stride[0] == 1 && turned->stride[1] == 3);
    SHOW(column->shape[1] == 1 && column->data[0] == 3 && column->data[column->stride[0]] == 6);
    hpml_tensor *copy = hpml_tensor_create_2d(ctx, 3, 2);
    hpml_tensor_copy(copy, turned); /* any strides */
    SHOW(copy->data[0] == 1 && copy->data[1] == 4 && copy->data[5] == 6);
    hpml_tensor_set(bf16, values, 6); /* converts */
    hpml_tensor_get_raw(bf16, half, 6 * hpml_dtype_size(HPML_DTYPE_BF16));
    SHOW(half[0] == 0x3f80 && half[1] == 0x4000); /* 1 and 2 as bf16 */
    half[0] = 0x4000;
    hpml_tensor_set_raw(bf16, half, sizeof half);
    hpml_tensor_get(bf16, back, 6);
    SHOW(back[0] == 2 && back[5] == 6);
    SHOW(strcmp(hpml_tensor_text(x, text, sizeof text), "f32 2x3 \"tensor\"") == 0);
    SHOW(hpml_tensor_count(hpml_tensor_create_3d(ctx, 2, 3, 4)) == 24);
    SHOW(hpml_tensor_count(hpml_tensor_create_4d(ctx, 2, 3, 4, 5)) == 120);
    hpml_npy_save(x, "build/tour.npy"); /* numpy.load reads it */
    hpml_tensor *loaded = hpml_npy_load(ctx, "build/tour.npy");
    SHOW(loaded && memcmp(loaded->data, values, sizeof values) == 0);
    hpml_tensor_free(loaded);
    hpml_tensor_free(column); /* optional: the context frees all */
}

/* Number i of a sequence can be computed by itself, so random numbers do not depend on threads or ranks. */
static void random_numbers(void)
{
    hpml_rng       r      = { .seed = 1, .stream = 2 }, again = r;
    const uint32_t key[2] = { 1, 0 }, counter[4] = { 0, 0, 2, 0 };
    uint32_t       block[4], words[4];
    float          uniform[1000];
    double         mean = 0;
    hpml_rng_fill_u32(&r, words, 4);
    hpml_philox4x32(key, counter, block);
    SHOW(memcmp(words, block, sizeof block) == 0);
    again.counter = 3;
    SHOW(hpml_rng_u32(&again) == words[3]);
    hpml_rng_fill_uniform(&r, uniform, 1000);
    for (int i = 0; i < 1000; i++) mean += uniform[i] / 1000;
    SHOW(mean > 0.45 && mean < 0.55);
    SHOW(hpml_permute_index(1, 0, 10, 3) != hpml_permute_index(1, 0, 10, 4)); /* a shuffle of 10, element by element */
}

int main(void)
{
    hpml_ctx *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 7, .threads = 1 });
    contexts(ctx);
    errors(ctx);
    tensors(ctx);
    random_numbers();
    return tour_end(ctx);
}
