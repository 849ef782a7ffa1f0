/* Exercise 16: gossip with neighbours. The task is in README.md; `ninja ex16` builds and checks your copy, mine.c. */
#include "check.h"

/* Sets w to the Metropolis weights of g. */
void gossip_weights(const gossip_graph *g, double *w)
{
    HPML_TODO("weights whose rows and columns add up to 1");
}

/* One step: x becomes the weighted mean of this rank's and its neighbours' x. spare: p * n floats. */
hpml_status gossip_step(hpml_comm *c, const gossip_graph *g, const double *w, float *x, int64_t n, float *spare)
{
    HPML_TODO("one step: messages with all neighbours, then the weighted mean");
}

/* Returns the largest |eigenvalue| of w besides the 1 of (1, ..., 1). */
double gossip_lambda(const double *w, int p)
{
    HPML_TODO("power iteration on vectors whose mean is 0");
}
