/* Exercise 09: data parallelism. The task is in README.md; `ninja ex09` builds and checks your copy, mine.c. */
#include "check.h"

hpml_status begin_training(hpml_comm *c, float *w)
{
    /* >> begin */
    return hpml_broadcast(c, w, WEIGHTS * sizeof(float), 0);
    /* << HPML_TODO("the weights of rank 0 on all ranks"); */
}

hpml_status train_step(hpml_comm *c, gradient_fn *gradient, void *data, int first, int count, float *w, float rate,
                       float *loss)
{
    /* >> step */
    const int p = hpml_comm_size(c), r = hpml_comm_rank(c);
    const int from = count * r / p, to = count * (r + 1) / p; /* this rank's part of the batch; it may be empty */
    float     sums[WEIGHTS + 1];                              /* the gradient and the loss: one message, not two */
    sums[WEIGHTS]  = (float)gradient(data, first + from, to - from, w, sums);
    hpml_status s  = sum_of_all(c, sums, WEIGHTS + 1);
    for (int k = 0; k < WEIGHTS; k++) w[k] -= rate * sums[k] / (float)count;
    *loss = sums[WEIGHTS] / (float)count;
    return s;
    /* << HPML_TODO("a step on a part of the batch, the sum over all ranks, the change of w"); */
}
