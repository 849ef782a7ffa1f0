/* Exercise 07: allreduce in two levels. The task is in README.md; `ninja ex07` builds and checks your copy, mine.c. */
#include "check.h"

hpml_status hierarchy_open(hpml_comm *c, hierarchy *h)
{
    /* >> open */
    h->node             = hpml_comm_split_node(c);
    const bool is_first = hpml_comm_rank(h->node) == 0;
    h->leaders          = hpml_comm_split(c, is_first ? 0 : -1, hpml_comm_rank(c));
    return hpml_ctx_status(hpml_comm_ctx(c));
    /* << HPML_TODO("the communicators of a node and of the leaders"); */
}

hpml_status hierarchy_allreduce(const hierarchy *h, float *x, int64_t n)
{
    /* >> allreduce */
    const hpml_allreduce_desc ring = { .algorithm = HPML_RING };
    hpml_reduce_to(h->node, x, n, HPML_ELEMENT_F32, HPML_SUM, 0);
    if (h->leaders) hpml_allreduce(h->leaders, x, n, &ring);
    return hpml_broadcast(h->node, x, (size_t)n * sizeof(float), 0);
    /* << HPML_TODO("sum in the node, ring of the leaders, broadcast in the node"); */
}
