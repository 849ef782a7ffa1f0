/* Exercise 03: minibatches and momentum. The task is in README.md; `ninja ex03` builds and checks your copy, mine.c. */
#include "check.h"

void shuffle(int *order, int n, rng *r)
{
    HPML_TODO("a shuffle");
}

void momentum_step(double *w, double *v, const double *g, double rate, double momentum)
{
    HPML_TODO("a step with momentum");
}

double train_epoch(gradient_fn *gradient, void *data, int n, int batch, double *w, double *v, double rate,
                   double momentum, rng *r)
{
    HPML_TODO("an epoch of minibatches");
}
