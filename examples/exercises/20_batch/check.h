/* Exercise 20: checks the noise scale, the rule for the learning rate, and the search for the largest useful batch. */
#include "../grade.h"

typedef struct batch_training batch_training; /* a model, its data, its target loss */

/* Trains from the start with this batch and learning rate. Returns how many steps it takes to the target loss; -1: the
   loss diverges. */
int64_t batch_train(batch_training *t, int64_t batch, double lr);

/* Returns the noise scale, tr / g2, from two measurements: the mean squared length of the gradient is squared1 with
   batches of batch1 samples and squared2 with batches of batch2. With a batch of b samples it is g2 + tr / b, where g2
   is the squared length of the gradient of all samples, and tr the variance of the gradient of one sample. */
double batch_noise(int64_t batch1, double squared1, int64_t batch2, double squared2);
/* Returns the learning rate for `batch`, if `lr` is good with `base`. A step's best rate is proportional to
   1 / (1 + noise / batch). */
double batch_lr(int64_t base, double lr, int64_t batch, double noise);
/* Returns the largest batch, a multiple of `base` up to `most` (a multiple as well), with which the training needs at
   most (1 + tolerance) times as many samples as with `base` and rate `lr`. Each larger batch takes batch_lr. If a batch
   needs too many, so do all larger ones. Trains seldom: first doubles the batch while that is good, then halves the gap
   between the largest good batch and the smallest bad one. */
int64_t batch_largest(batch_training *t, int64_t base, double lr, double noise, int64_t most, double tolerance);

/* A training by the law that these measurements follow (McCandlish and others, 2018): with the best rate for a batch,
   least_steps * (1 + noise / batch) steps; with e times this rate, 1 / (e (2 - e)) times as many. */
struct batch_training {
    double  noise, best_lr, least_steps;
    int64_t runs, largest; /* trainings that were run; the largest batch of them */
    double  worst_rate;    /* of all runs, the rate furthest from the best one, divided by that */
};
static batch_training batch;

int64_t batch_train(batch_training *t, int64_t size, double lr)
{
    const double rate = lr * (1 + t->noise / (double)size) / t->best_lr;
    t->runs++;
    if (size > t->largest) t->largest = size;
    if (fabs(log(rate)) > fabs(log(t->worst_rate))) t->worst_rate = rate;
    if (!(rate > 0 && rate < 2)) return -1;
    return (int64_t)ceil(t->least_steps * (1 + t->noise / (double)size) / (rate * (2 - rate)));
}

static void batch_new(void)
{
    batch = (batch_training){ .noise = grade_real(200, 20000), .best_lr = grade_real(0.1, 2),
                              .least_steps = grade_real(20000, 90000), .worst_rate = 1 };
}

static bool noise_scale(void)
{
    for (int k = 0; k < 200; k++) {
        const int64_t small = grade_int(1, 64), large = small * grade_int(2, 64);
        const double  g2 = grade_real(0.01, 2), tr = grade_real(1, 500);
        const double  squared1 = g2 + tr / (double)small, squared2 = g2 + tr / (double)large;
        const bool    swap = grade_int(0, 1) == 1;
        const double  got = swap ? batch_noise(large, squared2, small, squared1)
                                 : batch_noise(small, squared1, large, squared2);
        if (!(fabs(got - tr / g2) <= 1e-6 * tr / g2))
            return grade_fail("batches of %lld and %lld: squared lengths %.6g and %.6g: noise scale %.6g, expected "
                              "%.6g: two equations, squared = g2 + tr / batch, for two unknowns; g2 is not the "
                              "measurement with the larger batch", (long long)small, (long long)large,
                              squared1, squared2, got, tr / g2);
    }
    return true;
}

static bool rate_is(int64_t base, double lr, int64_t size, double noise, const char *why)
{
    const double right = lr * (1 + noise / (double)base) / (1 + noise / (double)size);
    const double got   = batch_lr(base, lr, size, noise);
    if (fabs(got - right) <= 1e-9 * right) return true;
    return grade_fail("noise scale %.0f: rate %.4g is good with batch %lld; with batch %lld %.6g, expected %.6g: %s",
                      noise, lr, (long long)base, (long long)size, got, right, why);
}

static bool rate_small(void)
{
    for (int k = 0; k < 100; k++) {
        const int64_t base = grade_int(1, 32);
        if (!rate_is(base, grade_real(0.01, 1), base * grade_int(1, 64), 1e7,
                     "far below the noise scale twice the batch allows twice the rate"))
            return false;
    }
    return true;
}

static bool rate_large(void)
{
    for (int k = 0; k < 100; k++) {
        const int64_t base = grade_int(1, 64);
        if (!rate_is(base, grade_real(0.01, 1), base * grade_int(1, 4096), grade_real(10, 5000),
                     "beyond the noise scale a larger batch has hardly a better gradient, so the rate grows no more"))
            return false;
    }
    return true;
}

/* Runs the search, and leaves in *right the batch that the law says. */
static bool batch_search(int64_t *right, int64_t *most)
{
    const int64_t base      = grade_int(1, 64);
    const double  tolerance = grade_real(0.1, 1);
    batch_new();
    *most = base * (1 << grade_int(4, 14));
    const double  lr    = batch.best_lr / (1 + batch.noise / (double)base);
    const double  limit = (1 + tolerance) * (double)batch_train(&batch, base, lr) * (double)base;
    batch.runs = 0;
    *right     = base;
    for (int64_t k = 1; k * base <= *most; k++) {
        const double steps = ceil(batch.least_steps * (1 + batch.noise / (double)(k * base)));
        if (steps * (double)(k * base) <= limit) *right = k * base;
        else break;
    }
    const int64_t got = batch_largest(&batch, base, lr, batch.noise, *most, tolerance);
    if (batch.worst_rate > 1.01 || batch.worst_rate < 0.99)
        return grade_fail("noise scale %.0f, base %lld: a training gets %.3g times the best learning rate of its "
                          "batch: batch_lr, from `base` and `lr`", batch.noise, (long long)base, batch.worst_rate);
    if (batch.largest > *most)
        return grade_fail("noise scale %.0f, base %lld: trains with batch %lld, and the most is %lld", batch.noise,
                          (long long)base, (long long)batch.largest, (long long)*most);
    if (got == *right) return true;
    return grade_fail("noise scale %.0f, base %lld, most %lld, tolerance %.2f: batch %lld, expected %lld: samples are "
                      "steps times batch, and %s", batch.noise, (long long)base, (long long)*most, tolerance,
                      (long long)got, (long long)*right, got > *right ? "this batch needs too many" :
                      "a larger multiple of `base` does not need too many either");
}

static bool largest(void)
{
    for (int k = 0; k < 200; k++) {
        int64_t right, most;
        if (!batch_search(&right, &most)) return false;
    }
    return true;
}

static bool few_trainings(void)
{
    for (int k = 0; k < 200; k++) {
        int64_t right, most, doublings = 0;
        if (!batch_search(&right, &most)) return false;
        while (most >> doublings > 1) doublings++;
        if (batch.runs > 2 * doublings + 3)
            return grade_fail("noise scale %.0f, most %lld: %lld trainings, each of which costs hours; doubling, then "
                              "halving the gap needs at most %lld", batch.noise, (long long)most, (long long)batch.runs,
                              (long long)(2 * doublings + 3));
    }
    return true;
}

static const grade_case cases[] = {
    { "noise scale", 20, noise_scale },
    { "rates of small batches", 15, rate_small },
    { "rates of any batch", 20, rate_large },
    { "the largest batch", 30, largest },
    { "few trainings", 15, few_trainings },
};
int main(int argc, char **argv) { return GRADE("20 largest batch", cases); }
