/* Exercise 23: CUDA kernels that pack a gradient into signs. The task is in README.md; `ninja ex23` builds and checks
   your copy, mine.cu. */
#include "check.h"

/* Packs the signs of v, adds up its negative elements and the others, and counts the others. */
static __global__ void sign_pack(const float *v, int n, unsigned *words, float *sums, int *ones)
{
    /* >> pack */
    __shared__ float warp_sums[2][32];
    __shared__ int   warp_ones[32];
    const int        i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const float      x    = i < n ? v[i] : 0;
    const bool       high = i < n && x >= 0;
    const unsigned   bits = __ballot_sync(0xffffffffu, high);
    float            low_sum = high ? 0 : x, high_sum = high ? x : 0;
    for (int delta = 16; delta > 0; delta /= 2) {
        low_sum += __shfl_down_sync(0xffffffffu, low_sum, delta);
        high_sum += __shfl_down_sync(0xffffffffu, high_sum, delta);
    }
    if (lane == 0) {
        if (i < n) words[i / 32] = bits;
        warp_sums[0][warp] = low_sum;
        warp_sums[1][warp] = high_sum;
        warp_ones[warp]    = __popc(bits);
    }
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int k = 1; k < (int)blockDim.x / 32; k++) {
        low_sum += warp_sums[0][k];
        high_sum += warp_sums[1][k];
        warp_ones[0] += warp_ones[k];
    }
    atomicAdd(&sums[0], low_sum);
    atomicAdd(&sums[1], high_sum);
    atomicAdd(ones, warp_ones[0]);
    /* << HPML_TODO("the bits of a warp by __ballot_sync; the sums of a block"); */
}

/* e becomes v less what is decoded: high where the bit is 1, low where it is 0. */
static __global__ void sign_residual(const float *v, int n, const unsigned *words, float low, float high, float *e)
{
    /* >> residual */
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    e[i] = v[i] - ((words[i / 32] >> i % 32 & 1) ? high : low);
    /* << HPML_TODO("the residual"); */
}
