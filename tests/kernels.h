/* For tests that run with each set of kernels: the names of the instruction sets, contexts and noise. */
#include "../hpml.h"

#include <string.h>

static const char *const isas[] = { "scalar", "avx2", "avx512", "neon" };
#define ISAS ((int)(sizeof isas / sizeof isas[0]))

/* Creates a context with the kernels of an instruction set; NULL if this CPU or build has none. */
static inline hpml_ctx *context(const char *isa, int threads)
{
    hpml_ctx_desc d;
    hpml_ctx     *ctx;
    memset(&d, 0, sizeof d);
    d.cpu     = isa;
    d.threads = threads;
    ctx = hpml_ctx_create(&d);
    if (hpml_ctx_status(ctx) == HPML_OK) return ctx;
    hpml_ctx_free(ctx);
    return NULL;
}

static uint32_t noise;
static inline float uniform(void) /* returns the next number of a sequence in [-1, 1) */
{
    noise = noise * 1664525u + 1013904223u;
    return (float)(noise >> 8) / 8388608.0f - 1.0f;
}
