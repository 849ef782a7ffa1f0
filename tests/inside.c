/* hpml.h's body, compiled once for all programs of build.ninja that need nothing else of it, and inside.h's doors. */
#define HPML_IMPLEMENTATION
#include "inside.h"

const void *inside_kernels(const char *isa) { return hpmli_kernels_find(isa); }

void inside_parallel(hpml_ctx *ctx, int64_t tasks, void (*fn)(void *arg, int64_t task, int thread), void *arg)
{
    hpmli_parallel(ctx, tasks, fn, arg);
}

void inside_map(const void *k, hpml_act f, float *y, const float *x, int64_t n)
{
    ((const hpmli_kernels *)k)->act_forward(f, 0, y, x, n);
}

void inside_random(const void *k, inside_numbers kind, void *out, uint64_t seed, uint64_t stream,
                   uint64_t first, int64_t n)
{
    ((const hpmli_kernels *)k)->random((hpmli_draw)kind, out, seed, stream, first, n);
}

bool inside_places(hpml_ctx *ctx, inside_slot *slots, int count, int times, bool tree)
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
