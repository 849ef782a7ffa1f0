/* Exercise 23: CUDA kernels that pack a gradient into signs. The task is in README.md; `ninja ex23` builds and checks
   your copy, mine.cu. */
#include "check.h"

/* Packs the signs of v, adds up its negative elements and the others, and counts the others. */
static __global__ void sign_pack(const float *v, int n, unsigned *words, float *sums, int *ones)
{
    HPML_TODO("the bits of a warp by __ballot_sync; the sums of a block");
}

/* e becomes v less what is decoded: high where the bit is 1, low where it is 0. */
static __global__ void sign_residual(const float *v, int n, const unsigned *words, float low, float high, float *e)
{
    HPML_TODO("the residual");
}
