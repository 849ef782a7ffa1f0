/* Exercise 07: allreduce in two levels. The task is in README.md; `ninja ex07` builds and checks your copy, mine.c. */
#include "check.h"

hpml_status hierarchy_open(hpml_comm *c, hierarchy *h)
{
    HPML_TODO("the communicators of a node and of the leaders");
}

hpml_status hierarchy_allreduce(const hierarchy *h, float *x, int64_t n)
{
    HPML_TODO("sum in the node, ring of the leaders, broadcast in the node");
}
