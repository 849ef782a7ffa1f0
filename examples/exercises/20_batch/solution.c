/* Exercise 20: the largest useful batch. The task is in README.md; `ninja ex20` builds and checks your copy, mine.c. */
#include "check.h"

/* Returns the noise scale from the mean squared lengths of the gradients of two sizes of batches. */
double batch_noise(int64_t batch1, double squared1, int64_t batch2, double squared2)
{
    /* >> noise */
    const double tr = (squared1 - squared2) / (1.0 / (double)batch1 - 1.0 / (double)batch2);
    const double g2 = squared1 - tr / (double)batch1;
    return tr / g2;
    /* << HPML_TODO("the noise scale"); */
}

/* Returns the learning rate for `batch`, if `lr` is good with `base`. */
double batch_lr(int64_t base, double lr, int64_t batch, double noise)
{
    /* >> rate */
    return lr * (1 + noise / (double)base) / (1 + noise / (double)batch);
    /* << HPML_TODO("the learning rate of a batch"); */
}

/* Returns the largest multiple of `base`, up to `most`, that needs at most (1 + tolerance) times as many samples. */
int64_t batch_largest(batch_training *t, int64_t base, double lr, double noise, int64_t most, double tolerance)
{
    /* >> search */
    const double limit = (1 + tolerance) * (double)batch_train(t, base, lr) * (double)base;
    int64_t      good = 1, bad = most / base + 1; /* in multiples of base */
    while (good + 1 < bad) {
        const bool    doubles = bad > most / base && 2 * good < bad; /* nothing bad has been found yet */
        const int64_t next    = doubles ? 2 * good : (good + bad) / 2;
        const int64_t steps   = batch_train(t, next * base, batch_lr(base, lr, next * base, noise));
        if (steps > 0 && (double)steps * (double)(next * base) <= limit) good = next;
        else bad = next;
    }
    return good * base;
    /* << HPML_TODO("the search for the largest batch"); */
}
