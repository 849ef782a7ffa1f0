/* Exercise 03: minibatches and momentum. The task is in README.md; `ninja ex03` builds and checks your copy, mine.c. */
#include "check.h"

void shuffle(int *order, int n, rng *r)
{
    /* >> shuffle */
    for (int i = n - 1; i > 0; i--) {
        const int k = random_below(r, i + 1), kept = order[i];
        order[i] = order[k];
        order[k] = kept;
    }
    /* << HPML_TODO("a shuffle"); */
}

void momentum_step(double *w, double *v, const double *g, double rate, double momentum)
{
    /* >> step */
    for (int i = 0; i < WEIGHTS; i++) {
        v[i] = momentum * v[i] + g[i];
        w[i] -= rate * v[i];
    }
    /* << HPML_TODO("a step with momentum"); */
}

double train_epoch(gradient_fn *gradient, void *data, int n, int batch, double *w, double *v, double rate,
                   double momentum, rng *r)
{
    /* >> epoch */
    int    order[SAMPLES_MAX];
    double g[WEIGHTS], loss = 0;
    for (int i = 0; i < n; i++) order[i] = i;
    shuffle(order, n, r);
    for (int at = 0; at < n; at += batch) {
        const int count = n - at < batch ? n - at : batch;
        loss += gradient(data, order + at, count, w, g);
        for (int i = 0; i < WEIGHTS; i++) g[i] /= count;
        momentum_step(w, v, g, rate, momentum);
    }
    return loss / n;
    /* << HPML_TODO("an epoch of minibatches"); */
}
