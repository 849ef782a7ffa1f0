/* Exercise 03: checks an epoch of minibatch gradient descent with momentum. */
#include "../grade.h"

enum { WEIGHTS = 3, SAMPLES_MAX = 256 };

typedef struct rng {
    uint64_t state;
} rng;
/* A random whole number from 0 to n - 1, each as likely as the others. */
static __attribute__((unused)) int random_below(rng *r, int n)
{
    uint64_t z = r->state += 0x9e3779b97f4a7c15u;
    z          = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z          = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (int)((z ^ z >> 31) % (uint64_t)n);
}

/* Puts order[0] to order[n - 1] in random order; each of the n! orders is as likely as the others. */
void shuffle(int *order, int n, rng *r);

/* v <- momentum v + g, w <- w - rate v; WEIGHTS numbers each. */
void momentum_step(double *w, double *v, const double *g, double rate, double momentum);

/* Sets g to the sum of the gradients, at w, of the losses of the samples sample[0] to sample[count - 1]. Returns the
   sum of these losses. */
typedef double gradient_fn(void *data, const int *sample, int count, const double *w, double *g);

/* One epoch: shuffles the samples 0 to n - 1, cuts them into batches of `batch` samples, of which the last may be
   shorter, and takes one step for each batch, with the mean gradient of its samples. v is the velocity, which lives on
   from epoch to epoch. Returns the mean loss of the n samples, each at the weights where its gradient was computed. */
double train_epoch(gradient_fn *gradient, void *data, int n, int batch, double *w, double *v, double rate,
                   double momentum, rng *r);

static bool near(double a, double b) { return fabs(a - b) <= 1e-9 * fmax(1, fabs(b)); }

static bool permutations(void)
{
    for (int n = 0; n <= 40; n++) {
        int *order = (int *)grade_memory("order", sizeof(int) * (size_t)n), seen[40] = { 0 };
        rng  r     = { grade_bits() };
        for (int i = 0; i < n; i++) order[i] = i;
        shuffle(order, n, &r);
        for (int i = 0; i < n; i++)
            if (order[i] < 0 || order[i] >= n || seen[order[i]]++)
                return grade_fail("of %d samples, sample %d is missing or twice in the order", n, order[i]);
    }
    return true;
}

/* All 24 orders of 4 samples: the chi-square statistic, with 23 degrees of freedom, is over 60 once in 30,000 seeds. */
static bool fair(void)
{
    enum { DRAWS = 24000 };
    int    counts[256] = { 0 };
    double chi = 0;
    rng    r   = { grade_bits() };
    for (int k = 0; k < DRAWS; k++) {
        int order[4] = { 0, 1, 2, 3 };
        shuffle(order, 4, &r);
        counts[order[0] + 4 * order[1] + 16 * order[2] + 64 * order[3]]++;
    }
    int most = 0, least = DRAWS;
    for (int k = 0; k < 256; k++) {
        const int a = k % 4, b = k / 4 % 4, c = k / 16 % 4, d = k / 64;
        if (a == b || a == c || a == d || b == c || b == d || c == d) continue;
        chi += (counts[k] - 1000.0) * (counts[k] - 1000.0) / 1000;
        if (counts[k] > most) most = counts[k];
        if (counts[k] < least) least = counts[k];
    }
    return chi < 60 || grade_fail("of 24000 shuffles of 4 samples, one order came %d times and another %d times: "
                                  "exchange element i with one of the elements 0 to i, not of all", most, least);
}

static bool momentum_steps(void)
{
    double w[WEIGHTS] = { 1, 2, 3 }, v[WEIGHTS] = { 0 }, x[WEIGHTS] = { 1, 2, 3 }, u[WEIGHTS] = { 0 }, g[WEIGHTS];
    for (int step = 1; step <= 4; step++) {
        for (int i = 0; i < WEIGHTS; i++) {
            g[i] = grade_real(-1, 1);
            u[i] = 0.9 * u[i] + g[i];
            x[i] -= 0.1 * u[i];
        }
        momentum_step(w, v, g, 0.1, 0.9);
        for (int i = 0; i < WEIGHTS; i++)
            if (!near(v[i], u[i]) || !near(w[i], x[i]))
                return grade_fail("step %d: v[%d] is %g and should be %g, w[%d] is %g and should be %g", step, i, v[i],
                                  u[i], i, w[i], x[i]);
    }
    return true;
}

/* A problem that notes what it is asked for. Sample i has the loss |w - a_i|^2 / 2. */
typedef struct problem {
    double a[SAMPLES_MAX][WEIGHTS];
    int    n, batches, count[2 * SAMPLES_MAX], order[2 * SAMPLES_MAX], seen; /* in two epochs */
    double w[2 * SAMPLES_MAX][WEIGHTS], loss[2];                              /* at each batch; sum of each epoch */
} problem;

static double problem_gradient(void *data, const int *sample, int count, const double *w, double *g)
{
    problem *p    = (problem *)data;
    double   loss = 0;
    if (count < 1 || p->seen + count > 2 * p->n) {
        grade_fail("a batch of %d samples, after %d of %d samples have been used in this epoch", count, p->seen % p->n,
                   p->n);
        grade_exit(GRADE_WRONG);
    }
    for (int i = 0; i < WEIGHTS; i++) g[i] = 0;
    for (int k = 0; k < count; k++) {
        p->order[p->seen + k] = sample[k];
        for (int i = 0; i < WEIGHTS && sample[k] >= 0 && sample[k] < p->n; i++) {
            const double d = w[i] - p->a[sample[k]][i];
            g[i] += d;
            loss += d * d / 2;
        }
    }
    memcpy(p->w[p->batches], w, sizeof p->w[0]);
    p->count[p->batches++] = count;
    p->loss[p->seen / p->n] += loss;
    p->seen += count;
    return loss;
}

/* Runs two epochs of n samples; rate 0.1, momentum 0.5. */
static problem *two_epochs(int n, int batch, double *w, double *v, double *returned)
{
    static problem p;
    rng            r = { grade_bits() };
    memset(&p, 0, sizeof p);
    p.n = n;
    for (int i = 0; i < n; i++)
        for (int k = 0; k < WEIGHTS; k++) p.a[i][k] = grade_real(-1, 1) + (i % 5) * (k + 1);
    for (int k = 0; k < WEIGHTS; k++) {
        w[k] = 5;
        v[k] = 0;
    }
    for (int e = 0; e < 2; e++) returned[e] = train_epoch(problem_gradient, &p, n, batch, w, v, 0.1, 0.5, &r);
    return &p;
}

static bool batches(void)
{
    for (int k = 0; k < 12; k++) {
        double         w[WEIGHTS], v[WEIGHTS], loss[2];
        const int      batch = grade_int(3, 9), n = batch * grade_int(2, 6) + k % 3, each = (n + batch - 1) / batch;
        const problem *p = two_epochs(n, batch, w, v, loss);
        if (p->seen < 2 * n)
            return grade_fail("%d samples, batches of %d: only %d of them are used%s", n, batch, p->seen / 2,
                              n % batch ? "; the last batch is shorter" : "");
        for (int b = 0; b < p->batches; b++) {
            const int expected = b % each == each - 1 && n % batch ? n % batch : batch;
            if (p->count[b] != expected)
                return grade_fail("%d samples, batches of %d: batch %d of an epoch has %d samples and should have %d",
                                  n, batch, b % each, p->count[b], expected);
        }
        for (int e = 0; e < 2; e++) {
            bool seen[SAMPLES_MAX] = { false };
            for (int i = 0; i < n; i++) {
                const int s = p->order[e * n + i];
                if (s < 0 || s >= n || seen[s]) return grade_fail("sample %d is used twice in an epoch of %d", s, n);
                seen[s] = true;
            }
        }
    }
    return true;
}

static bool new_order(void)
{
    double         w[WEIGHTS], v[WEIGHTS], loss[2];
    const problem *p = two_epochs(100, 10, w, v, loss);
    bool           sorted = true;
    for (int i = 0; i < 100; i++) sorted = sorted && p->order[i] == i;
    if (sorted) return grade_fail("the first epoch takes the samples in their own order: shuffle them");
    return memcmp(p->order, p->order + 100, 100 * sizeof(int)) ||
           grade_fail("the second epoch has the order of the first: go on with the same random numbers");
}

/* Replays the steps from the weights that the gradients were asked for at. */
static bool weights(void)
{
    for (int k = 0; k < 6; k++) {
        double    w[WEIGHTS], v[WEIGHTS], loss[2], u[WEIGHTS] = { 0 };
        const int batch = grade_int(3, 9), n = batch * grade_int(2, 5) + (k < 3 ? 0 : grade_int(1, batch - 1));
        problem  *p = two_epochs(n, batch, w, v, loss);
        int       at = 0;
        memcpy(p->w[p->batches], w, sizeof w);
        for (int b = 0; b < p->batches; at += p->count[b++])
            for (int i = 0; i < WEIGHTS; i++) {
                double sum = 0;
                for (int s = at; s < at + p->count[b]; s++) sum += p->w[b][i] - p->a[p->order[s]][i];
                const double mean = sum / p->count[b], step = p->w[b][i] - p->w[b + 1][i], old = u[i];
                u[i] = 0.5 * u[i] + mean;
                if (near(step, 0.1 * u[i])) continue;
                if (p->count[b] < batch && near(step, 0.1 * (0.5 * old + sum / batch)))
                    return grade_fail("the last batch has %d samples, and its gradient is divided by %d: its mean is "
                                      "over its own samples", p->count[b], batch);
                if (near(step, 0.1 * (0.5 * old + sum)))
                    return grade_fail("the step takes the sum of the gradients: a batch's gradient is the mean");
                if (at == n && near(step, 0.1 * mean))
                    return grade_fail("the second epoch begins with velocity 0: v lives on from epoch to epoch");
                return grade_fail("%d samples, batches of %d, batch %d: w[%d] changes by %g and should by %g", n, batch,
                                  b, i, -step, -0.1 * u[i]);
            }
    }
    return true;
}

static bool mean_loss(void)
{
    double         w[WEIGHTS], v[WEIGHTS], loss[2];
    const int      batch = grade_int(6, 9), n = 3 * batch + 1;
    const problem *p = two_epochs(n, batch, w, v, loss);
    for (int e = 0; e < 2; e++)
        if (!near(loss[e], p->loss[e] / n))
            return grade_fail("%d samples, batches of %d: the mean loss of epoch %d is %g, returned is %g: each sample "
                              "counts once, so a short batch counts less", n, batch, e, p->loss[e] / n, loss[e]);
    return true;
}

static const grade_case cases[] = {
    { "shuffle: every sample once", 10, permutations },
    { "shuffle: all orders as likely", 15, fair },
    { "steps with momentum", 15, momentum_steps },
    { "batches: every sample once in an epoch", 20, batches },
    { "a new order in each epoch", 10, new_order },
    { "the weights after each batch", 20, weights },
    { "the mean loss of an epoch", 10, mean_loss },
};
int main(int argc, char **argv) { return GRADE("03 minibatches and momentum", cases); }
