/* Exercise 20: the largest useful batch. The task is in README.md; `ninja ex20` builds and checks your copy, mine.c. */
#include "check.h"

/* Returns the noise scale from the mean squared lengths of the gradients of two sizes of batches. */
double batch_noise(int64_t batch1, double squared1, int64_t batch2, double squared2)
{
    HPML_TODO("the noise scale");
}

/* Returns the learning rate for `batch`, if `lr` is good with `base`. */
double batch_lr(int64_t base, double lr, int64_t batch, double noise)
{
    HPML_TODO("the learning rate of a batch");
}

/* Returns the largest multiple of `base`, up to `most`, that needs at most (1 + tolerance) times as many samples. */
int64_t batch_largest(batch_training *t, int64_t base, double lr, double noise, int64_t most, double tolerance)
{
    HPML_TODO("the search for the largest batch");
}
