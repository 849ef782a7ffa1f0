/* Exercise 12: the largest numbers of a gradient. The task is in README.md; `ninja ex12` builds and checks your copy,
   mine.c. */
#include "check.h"

/* Helpers of your own, if you like: */
/* >> helpers */
static int by_size(const void *a, const void *b) /* largest first; of equal ones the smaller index */
{
    const pair *x = (const pair *)a, *y = (const pair *)b;
    if (fabsf(x->value) != fabsf(y->value)) return fabsf(x->value) > fabsf(y->value) ? -1 : 1;
    return x->index < y->index ? -1 : 1;
}
static int by_index(const void *a, const void *b)
{
    return *(const int32_t *)a < *(const int32_t *)b ? -1 : 1;
}
/* << */

void top_k(const float *v, int64_t n, int64_t k, int32_t *index)
{
    /* >> select */
    pair *all = (pair *)malloc(((size_t)n + 1) * sizeof *all);
    for (int64_t i = 0; i < n; i++) all[i] = (pair){ (int32_t)i, v[i] };
    qsort(all, (size_t)n, sizeof *all, by_size);
    for (int64_t i = 0; i < k; i++) index[i] = all[i].index;
    qsort(index, (size_t)k, sizeof *index, by_index);
    free(all);
    /* << HPML_TODO("the indices of the k largest numbers"); */
}

void compress(pair *out, kept *state, const float *g, int64_t n, int64_t k, float momentum)
{
    /* >> compress */
    int32_t *index = (int32_t *)malloc(((size_t)k + 1) * sizeof *index);
    for (int64_t i = 0; i < n; i++) {
        state->velocity[i] = momentum * state->velocity[i] + g[i];
        state->unsent[i] += state->velocity[i];
    }
    top_k(state->unsent, n, k, index);
    for (int64_t i = 0; i < k; i++) {
        out[i] = (pair){ index[i], state->unsent[index[i]] };
        state->unsent[index[i]] = 0;
    }
    free(index);
    /* << HPML_TODO("velocity, unsent numbers, the largest as pairs"); */
}

hpml_status topk_allreduce(hpml_comm *c, float *g, kept *state, int64_t n, int64_t k, float momentum, pair *all)
{
    /* >> allreduce */
    const int    p = hpml_comm_size(c), r = hpml_comm_rank(c);
    const size_t bytes = (size_t)k * sizeof(pair);
    compress(all + r * k, state, g, n, k, momentum);
    for (int step = 1; step < p; step++) {
        const int   to = (r + step) % p, from = (r + p - step) % p;
        hpml_status s  = hpml_sendrecv(c, to, all + r * k, bytes, from, all + from * k, bytes, 0);
        if (s != HPML_OK) return s;
    }
    for (int64_t i = 0; i < n; i++) g[i] = 0;
    for (int64_t i = 0; i < p * k; i++) g[all[i].index] += all[i].value;
    return HPML_OK;
    /* << HPML_TODO("compress, exchange pairs, add up in the order of the ranks"); */
}
