/* Exercise 11: gradients of one bit with error feedback. The task is in README.md; `ninja ex11` builds and checks your
   copy, mine.c. */
#include "check.h"

void onebit_encode(onebit *packed, float *residual, const float *g, int64_t n)
{
    /* >> encode */
    float   sum[2] = { 0, 0 };
    int64_t count[2] = { 0, 0 };
    for (int64_t k = 0; k < (n + 31) / 32; k++) packed->word[k] = 0;
    for (int64_t i = 0; i < n; i++) {
        residual[i] += g[i]; /* v = g + residual, which is packed */
        const int bit = residual[i] >= 0;
        packed->word[i / 32] |= (uint32_t)bit << (i % 32);
        sum[bit] += residual[i];
        count[bit]++;
    }
    packed->low  = count[0] > 0 ? sum[0] / (float)count[0] : 0;
    packed->high = count[1] > 0 ? sum[1] / (float)count[1] : 0;
    for (int64_t i = 0; i < n; i++) residual[i] -= packed->word[i / 32] >> (i % 32) & 1 ? packed->high : packed->low;
    /* << HPML_TODO("low, high, a bit for each number, and the residual"); */
}

void onebit_add(float *sum, const onebit *packed, int64_t n)
{
    /* >> add */
    for (int64_t i = 0; i < n; i++) sum[i] += packed->word[i / 32] >> (i % 32) & 1 ? packed->high : packed->low;
    /* << HPML_TODO("add the packed numbers"); */
}

hpml_status onebit_allreduce(hpml_comm *c, float *g, float *residual, int64_t n, char *all)
{
    /* >> allreduce */
    const int    p = hpml_comm_size(c), r = hpml_comm_rank(c);
    const size_t bytes = onebit_bytes(n);
    char        *mine = all + (size_t)r * bytes;
    onebit_encode((onebit *)(void *)mine, residual, g, n);
    for (int k = 1; k < p; k++) { /* in move k to the rank k places on */
        const int   to = (r + k) % p, from = (r + p - k) % p;
        hpml_status s = hpml_sendrecv(c, to, mine, bytes, from, all + (size_t)from * bytes, bytes, 0);
        if (s != HPML_OK) return s;
    }
    for (int64_t i = 0; i < n; i++) g[i] = 0;
    for (int k = 0; k < p; k++) onebit_add(g, (const onebit *)(const void *)(all + (size_t)k * bytes), n);
    return HPML_OK;
    /* << HPML_TODO("pack, exchange, add up in the order of the ranks"); */
}
