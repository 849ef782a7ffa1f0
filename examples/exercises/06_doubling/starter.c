/* Exercise 06: allreduce by recursive doubling. The task is in README.md; `ninja ex06` builds and checks your copy,
   mine.c. */
#include "check.h"

hpml_status doubling_allreduce(hpml_comm *c, float *x, int64_t n, float *spare)
{
    HPML_TODO("recursive doubling");
}

double crossover(int p, double latency, double bandwidth)
{
    HPML_TODO("the n at which both take equally long");
}
