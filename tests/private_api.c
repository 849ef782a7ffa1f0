/* hpml.h's body, compiled once and linked to nearly every program of build.ninja, and the functions of private_api.h,
   which make a few private functions of hpml.h callable from tests. */
#define HPML_IMPLEMENTATION
#include "private_api.h"

const void *private_kernels(const char *isa) { return hpmli_kernels_find(isa); }

void private_parallel(hpml_ctx *ctx, int64_t tasks, void (*fn)(void *arg, int64_t task, int thread), void *arg)
{
    hpmli_parallel(ctx, tasks, fn, arg);
}

void private_activation(const void *k, hpml_act f, float *y, const float *x, int64_t n)
{
    ((const hpmli_kernels *)k)->act_forward(f, 0, y, x, n);
}

void private_random(const void *k, private_numbers kind, void *out, uint64_t seed, uint64_t stream,
                    uint64_t first, int64_t n)
{
    ((const hpmli_kernels *)k)->random((hpmli_draw)kind, out, seed, stream, first, n);
}

bool private_offsets(hpml_ctx *ctx, private_slot *slots, int count, int times, bool tree)
{
    hpmli_slot *s = hpmli_new(ctx, hpmli_slot, count);
    for (int i = 0; s && i < count; i++) {
        s[i].bytes = slots[i].bytes;
        s[i].from  = slots[i].from;
        s[i].to    = slots[i].to;
    }
    bool good = s && (tree ? hpmli_place_tree(ctx, s, count, times) : hpmli_place_list(ctx, s, count));
    for (int i = 0; good && i < count; i++) slots[i].offset = s[i].offset;
    hpmli_free(ctx, s);
    return good;
}
