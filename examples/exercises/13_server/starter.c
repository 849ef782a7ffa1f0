/* Exercise 13: a synchronous parameter server. The task is in README.md; `ninja ex13` builds and checks your copy,
   mine.c. */
#include "check.h"

/* Rank 0. room: memory for p arrays of n floats. */
hpml_status serve(hpml_comm *c, float *w, int64_t n, int rounds, float lr, float *room)
{
    HPML_TODO("the server: receive all gradients, in the order in which they arrive");
}

/* Ranks 1 to p - 1. */
hpml_status work(hpml_comm *c, float *w, float *g, int64_t n, int rounds)
{
    HPML_TODO("a worker: receive weights, compute, send the gradient");
}
