/* Exercise 23: checks two CUDA kernels that pack a gradient into one bit for each element. Compiled by nvcc, they run
   on a GPU, else on the CPU, in an emulation which runs the threads of a block in many orders. */
#ifndef SIGNPACK_H
#define SIGNPACK_H

#include "../grade.h"
#ifdef __CUDACC__
#include <cuda_runtime.h>
#define PACK_LAUNCH(kernel, grid, block, ...) kernel<<<grid, block>>>(__VA_ARGS__)
#undef HPML_TODO
#define HPML_TODO(what) /* on a GPU a kernel cannot end the program: its results are wrong */
#else
#define HPML_CUDA_ON_CPU
#include "../../../tests/emulator/cuda_on_cpu.h"
#define PACK_LAUNCH(kernel, grid, block, ...) HPMLG_LAUNCH(kernel, grid, block, 0, (cudaStream_t)0, __VA_ARGS__)
#endif

static int64_t pack_atomics; /* calls of atomicAdd; 0 on a GPU */
#ifndef __CUDACC__
#define atomicAdd(...) (pack_atomics++, (atomicAdd)(__VA_ARGS__))
#endif

/* A thread for each element of v, n floats; the last block has threads without one. Bit i % 32 of words[i / 32] becomes
   1 where v[i] >= 0, else 0; bits behind the last element are 0. Adds to sums[0] the sum of the negative elements, to
   sums[1] the sum of the others, and to *ones how many others there are; these three are 0 before. Each block adds once
   to each of them. Blocks have 32, 64, ... 1024 threads. */
static __global__ void sign_pack(const float *v, int n, unsigned *words, float *sums, int *ones);
/* e[i] becomes v[i] less what is decoded: high where the bit of element i is 1, low where it is 0. */
static __global__ void sign_residual(const float *v, int n, const unsigned *words, float low, float high, float *e);

enum { PACK_MOST = 3000, PACK_BEHIND = 1024, PACK_ORDERS = 6 };

typedef struct pack_run {
    int      n, block;
    float    v[PACK_MOST], e[PACK_MOST + 2], low, high;
    unsigned words[PACK_MOST / 32 + 4];
    float    sums[2];
    int      ones;
    char     what[96];
} pack_run;
static pack_run pack;

static void pack_fill(int n, int block)
{
    pack.n     = n;
    pack.block = block;
    for (int i = 0; i < n; i++) {
        pack.v[i] = (float)grade_real(-1, 1);
        if (grade_int(0, 9) == 0) pack.v[i] = grade_int(0, 1) ? 0.0f : -0.0f;
    }
    snprintf(pack.what, sizeof pack.what, "%d floats, blocks of %d threads", n, block);
}

/* Device memory of `bytes` bytes with a copy of `from`. */
static char *pack_device(const void *from, size_t bytes)
{
    void *p = NULL;
    if (cudaMalloc(&p, bytes) != cudaSuccess || cudaMemcpy(p, from, bytes, cudaMemcpyHostToDevice) != cudaSuccess) {
        grade_fail("no device memory");
        grade_exit(GRADE_WRONG);
    }
    return (char *)p;
}

static void pack_expect(int order)
{
#ifndef __CUDACC__
    cuda_on_cpu_order((unsigned)order);
    cuda_on_cpu_expect();
#endif
    (void)order;
}

/* Waits for a kernel; false: it has failed. */
static bool pack_ends(const char *kernel)
{
    const char       *text   = "";
    const cudaError_t status = cudaDeviceSynchronize();
#ifndef __CUDACC__
    text = cuda_on_cpu_caught();
#endif
    if (!text[0] && status == cudaSuccess) return true;
    return grade_fail("%s, %s: %s: all threads of a warp must reach a __..._sync operation, and all of a block a "
                      "__syncthreads, also those without an element", kernel, pack.what,
                      text[0] ? text : "the launch has failed");
}

/* Runs sign_pack, whose array v has NaN behind its end. */
static bool pack_go(int order)
{
    static float behind[PACK_MOST + PACK_BEHIND];
    const int    count = (pack.n + 31) / 32, blocks = (pack.n + pack.block - 1) / pack.block;
    const float  zero[3] = { 0, 0, 0 };
    memset(behind, 0xff, sizeof behind);
    memcpy(behind, pack.v, (size_t)pack.n * sizeof(float));
    for (int i = 0; i < count + 2; i++) pack.words[i] = 0xA5A5A5A5u;
    char *v = pack_device(behind, sizeof behind), *sums = pack_device(zero, sizeof zero);
    char *words = pack_device(pack.words, (size_t)(count + 2) * sizeof(unsigned));
    pack_atomics = 0;
    pack_expect(order);
    PACK_LAUNCH(sign_pack, blocks, pack.block, (const float *)v, pack.n, (unsigned *)words, (float *)sums,
                (int *)(sums + 8));
    if (!pack_ends("sign_pack")) return false;
    cudaMemcpy(pack.words, words, (size_t)(count + 2) * sizeof(unsigned), cudaMemcpyDeviceToHost);
    cudaMemcpy(pack.sums, sums, 8, cudaMemcpyDeviceToHost);
    cudaMemcpy(&pack.ones, sums + 8, 4, cudaMemcpyDeviceToHost);
    cudaFree(v);
    cudaFree(words);
    cudaFree(sums);
    return true;
}

static unsigned pack_right_word(int at)
{
    unsigned word = 0;
    for (int i = 32 * at; i < pack.n && i < 32 * at + 32; i++) word |= (unsigned)(pack.v[i] >= 0) << i % 32;
    return word;
}

static bool pack_words_are_right(void)
{
    const int count = (pack.n + 31) / 32;
    for (int k = 0; k < count; k++) {
        const unsigned right = pack_right_word(k), got = pack.words[k];
        if (got == right) continue;
        int bit = 0;
        while (((got ^ right) >> bit & 1) == 0) bit++;
        const int i = 32 * k + bit;
        if (i >= pack.n)
            return grade_fail("%s: bit %d of words[%d] is 1, and there is no element %d: such a thread votes 0",
                              pack.what, bit, k, i);
        return grade_fail("%s: words[%d] is %08x, expected %08x; element %d is %g, and bit i %% 32 of words[i / 32] is "
                          "1 where v[i] >= 0", pack.what, k, got, right, i, pack.v[i]);
    }
    for (int k = count; k < count + 2; k++)
        if (pack.words[k] != 0xA5A5A5A5u)
            return grade_fail("%s: words[%d] is written, and there are only %d words", pack.what, k, count);
    return true;
}

static bool pack_sums_are_right(int order)
{
    const bool any_order = order > 0 || pack.n % pack.block == 0; /* else v may have been read behind its end */
    double sums[2] = { 0, 0 };
    int    ones    = 0;
    for (int i = 0; i < pack.n; i++) {
        sums[pack.v[i] >= 0] += pack.v[i];
        ones += pack.v[i] >= 0;
    }
    for (int k = 0; k < 2; k++)
        if (!(fabs(pack.sums[k] - sums[k]) <= 1e-4 * (1 + fabs(sums[k]))))
            return grade_fail("%s: the sum of the %s elements is %g, expected %g%s%s", pack.what,
                              k ? "other" : "negative", pack.sums[k], sums[k],
                              isnan(pack.sums[k]) ? ": NaN comes from behind the end of v, or from shared memory "
                                                    "before it is written" : "",
                              any_order ? "; the threads of a block run in any order: is a __syncthreads missing?"
                                        : "");
    if (pack.ones != ones)
        return grade_fail("%s: %d elements are >= 0, expected %d", pack.what, pack.ones, ones);
    return true;
}

static bool pack_sizes(bool any, bool sums)
{
    for (int block = 32; block <= 256; block *= 2)
        for (int order = 0; order < PACK_ORDERS; order++) {
            pack_fill(any ? grade_int(1, 1500) : block * grade_int(1, 5), block);
            if (!pack_go(order) || !(sums ? pack_sums_are_right(order) : pack_words_are_right())) return false;
        }
    return true;
}

static bool signs(void) { return pack_sizes(false, false); }
static bool signs_of_any_size(void) { return pack_sizes(true, false); }
static bool totals(void) { return pack_sizes(false, true); }
static bool totals_of_any_size(void) { return pack_sizes(true, true); }

static bool atomics(void)
{
    for (int block = 32; block <= 256; block *= 2) {
        pack_fill(PACK_MOST - 1, block);
        if (!pack_go(0)) return false;
        const int blocks = (pack.n + block - 1) / block;
        if (pack_atomics > 3 * blocks)
            return grade_fail("%s: %lld calls of atomicAdd, and three for each of the %d blocks are enough: add up "
                              "inside a warp by __shfl_down_sync, then over the block's warps in shared memory",
                              pack.what,
                              (long long)pack_atomics, blocks);
    }
    return true;
}

static bool residuals(void)
{
    for (int block = 32; block <= 256; block *= 2) {
        pack_fill(grade_int(1, 1500), block);
        const int blocks = (pack.n + block - 1) / block, count = (pack.n + 31) / 32;
        for (int k = 0; k < count; k++) pack.words[k] = pack_right_word(k);
        for (int i = 0; i < pack.n + 2; i++) pack.e[i] = 7;
        pack.low  = (float)grade_real(-1, 0);
        pack.high = (float)grade_real(0, 1);
        char *v = pack_device(pack.v, (size_t)pack.n * 4), *words = pack_device(pack.words, (size_t)count * 4);
        char *e = pack_device(pack.e, (size_t)(pack.n + 2) * 4);
        pack_expect(0);
        PACK_LAUNCH(sign_residual, blocks, block, (const float *)v, pack.n, (const unsigned *)words, pack.low,
                    pack.high, (float *)e);
        if (!pack_ends("sign_residual")) return false;
        cudaMemcpy(pack.e, e, (size_t)(pack.n + 2) * 4, cudaMemcpyDeviceToHost);
        for (int i = 0; i < pack.n + 2; i++) {
            const float right = i >= pack.n ? 7 : pack.v[i] - (pack.v[i] >= 0 ? pack.high : pack.low);
            if (pack.e[i] != right)
                return grade_fail("%s: e[%d] is %g, expected %g%s", pack.what, i, pack.e[i], right,
                                  i >= pack.n ? ": it is behind the end of e" : ": v[i] less high where the bit is 1, "
                                                                                 "less low where it is 0");
        }
        cudaFree(v);
        cudaFree(words);
        cudaFree(e);
    }
    return true;
}

static const grade_case cases[] = {
    { "bits", 20, signs },
    { "bits of any number of elements", 20, signs_of_any_size },
    { "sums and count", 20, totals },
    { "sums and count of any number", 15, totals_of_any_size },
    { "one addition for each block", 10, atomics },
    { "residual", 15, residuals },
};
int main(int argc, char **argv) { return GRADE("23 sign-pack kernel", cases); }

#endif
