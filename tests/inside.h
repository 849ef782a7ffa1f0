/* What tests call of hpml.h's private functions: doors in the one unit that has its body, inside.c. */
#include "../hpml.h"

/* The kernels for an instruction set, NULL where this CPU or build has none: hpml_packing.kernels, and k below. */
const void *inside_kernels(const char *isa);
void inside_parallel(hpml_ctx *ctx, int64_t tasks, void (*fn)(void *arg, int64_t task, int thread), void *arg);

void inside_map(const void *k, hpml_act f, float *y, const float *x, int64_t n);

typedef enum inside_numbers { INSIDE_WORDS, INSIDE_UNIFORM, INSIDE_NORMAL } inside_numbers;
void inside_random(const void *k, inside_numbers kind, void *out, uint64_t seed, uint64_t stream,
                   uint64_t first, int64_t n);

/* Offsets of arrays that live from time `from` to time `to` (0 to times - 1), by both ways that plans take. */
typedef struct inside_slot { size_t bytes, offset; int from, to; } inside_slot;
bool inside_places(hpml_ctx *ctx, inside_slot *slots, int count, int times, bool tree);
