/* Exercise 04: broadcast and reduce by a tree. The task is in README.md; `ninja ex04` builds and checks your copy,
   mine.c. */
#include "check.h"

hpml_status tree_broadcast(hpml_comm *c, float *x, int64_t n, int root)
{
    /* >> broadcast */
    const int    p = hpml_comm_size(c), r = (hpml_comm_rank(c) - root + p) % p; /* from the root */
    const size_t bytes = (size_t)n * sizeof(float);
    int          bit   = 1;
    while (bit < p && !(r & bit)) bit *= 2; /* r receives from r without its lowest bit */
    if (r > 0) hpml_recv(c, (r - bit + root) % p, 0, x, bytes);
    for (bit /= 2; bit > 0; bit /= 2)
        if (r + bit < p) hpml_send(c, (r + bit + root) % p, 0, x, bytes);
    return hpml_ctx_status(hpml_comm_ctx(c));
    /* << HPML_TODO("a broadcast by a binomial tree"); */
}

hpml_status tree_reduce(hpml_comm *c, float *x, int64_t n, float *spare, int root)
{
    /* >> reduce */
    const int    p = hpml_comm_size(c), r = (hpml_comm_rank(c) - root + p) % p;
    const size_t bytes = (size_t)n * sizeof(float);
    int          bit   = 1;
    for (; bit < p && !(r & bit); bit *= 2) {
        if (r + bit >= p) continue;
        if (hpml_recv(c, (r + bit + root) % p, 0, spare, bytes) != HPML_OK) break;
        for (int64_t i = 0; i < n; i++) x[i] += spare[i];
    }
    if (r > 0) hpml_send(c, (r - bit + root) % p, 0, x, bytes);
    return hpml_ctx_status(hpml_comm_ctx(c));
    /* << HPML_TODO("a reduction by a binomial tree"); */
}
