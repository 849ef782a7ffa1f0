/* Private functions of hpml.h that tests call. private_api.c, the unit with hpml.h's body, defines them. */
#include "../hpml.h"

/* Returns the kernels for an instruction set, NULL if this CPU or build has none. hpml_packing.kernels and the argument
   k below take the result. */
const void *private_kernels(const char *isa);
void private_parallel(hpml_ctx *ctx, int64_t tasks, void (*fn)(void *arg, int64_t task, int thread), void *arg);

void private_activation(const void *k, hpml_act f, float *y, const float *x, int64_t n);

typedef enum private_numbers { PRIVATE_WORDS, PRIVATE_UNIFORM, PRIVATE_NORMAL } private_numbers;
void private_random(const void *k, private_numbers kind, void *out, uint64_t seed, uint64_t stream,
                    uint64_t first, int64_t n);

/* Plans the offsets of `count` arrays, each in use from time `from` to time `to` (0 to times - 1), by one of hpml.h's
   two planners: tree, for long plans, or list. */
typedef struct private_slot { size_t bytes, offset; int from, to; } private_slot;
bool private_offsets(hpml_ctx *ctx, private_slot *slots, int count, int times, bool tree);
