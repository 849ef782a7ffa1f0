/* The peak of one thread, measured: multiply-adds in registers and nothing else. Benchmarks report a fraction of it.
   Include this file after hpml.h. */
#ifndef HPML_PEAK_H
#define HPML_PEAK_H
#include <string.h>

#define PEAK_STEPS 400000
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
/* Twelve independent chains of multiply-adds: a core starts two per cycle and finishes each after four or five cycles,
   so at least ten must be in flight. */
#define CHAINS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#define DECLARE512(i) __m512 v##i = _mm512_set1_ps(i);
#define FMA512(i)     __asm__ __volatile__("vfmadd231ps %1, %1, %0" : "+v"(v##i) : "v"(x));
#define DECLARE256(i) __m256 v##i = _mm256_set1_ps(i);
#define FMA256(i)     __asm__ __volatile__("vfmadd231ps %1, %1, %0" : "+x"(v##i) : "x"(x));
__attribute__((target("avx512f"))) static double peak512(void)
{
    __m512 x = _mm512_set1_ps(1e-6f);
    CHAINS(DECLARE512)
    for (int s = 0; s < PEAK_STEPS; s++) { CHAINS(FMA512) }
    return 12.0 * 32 * PEAK_STEPS;
}
__attribute__((target("avx2,fma"))) static double peak256(void)
{
    __m256 x = _mm256_set1_ps(1e-6f);
    CHAINS(DECLARE256)
    for (int s = 0; s < PEAK_STEPS; s++) { CHAINS(FMA256) }
    return 12.0 * 16 * PEAK_STEPS;
}
/* Returns the number of floating-point operations done; 0 for kernels (hpml_ctx_cpu) that have no such loop here. */
static double peak_run(const char *cpu)
{
    if (strcmp(cpu, "avx512") == 0) return peak512();
    return strcmp(cpu, "avx2") == 0 ? peak256() : 0;
}
#else
static double peak_run(const char *cpu)
{
    (void)cpu;
    return 0;
}
#endif

static double peak_gflops(const char *cpu)
{
    double start = hpml_now(), flops = peak_run(cpu);
    return flops / (hpml_now() - start) * 1e-9;
}

#endif
