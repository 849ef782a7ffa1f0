/* Exercise 09: checks training with data parallelism: the same weights as one rank computes, bit for bit. */
#include "../ranks.h"

enum { WEIGHTS = 5, SAMPLES = 50, STEPS = 8 };

/* Sets g, WEIGHTS numbers, to the sum of the gradients, at w, of the losses of the samples first to first + count - 1.
   Returns the sum of these losses. count may be 0. */
typedef double gradient_fn(void *data, int first, int count, const float *w, float *g);

/* Adds up x, n floats, over all ranks. All ranks have to call it. */
hpml_status sum_of_all(hpml_comm *c, float *x, int n);

/* Before the training ranks have different random weights w. Afterwards all have those of rank 0. */
hpml_status begin_training(hpml_comm *c, float *w);

/* One step on the batch of samples first to first + count - 1. Each rank computes the gradients of a part of the batch;
   no part is larger than another by more than one sample. All ranks change w by -rate times the gradient of the mean
   loss of the whole batch, and set *loss to this mean. One call of sum_of_all is enough. */
hpml_status train_step(hpml_comm *c, gradient_fn *gradient, void *data, int first, int count, float *w, float rate,
                       float *loss);

/* A linear model. The gradient and the loss of each sample are rounded to multiples of 1/64, so that all sums are
   exact in any order, and p ranks can be compared with one rank bit for bit. */
typedef struct task {
    float x[SAMPLES][WEIGHTS], y[SAMPLES];
} task;

typedef struct part { /* samples of which a rank has asked for the gradient, in one step */
    int first, count, calls;
} part;

typedef struct dp_run {
    int   p, batch, step[RANKS_MAX], sums[RANKS_MAX]; /* step that a rank is in; its calls of sum_of_all */
    task  t;
    part  parts[STEPS][RANKS_MAX];
    float w[RANKS_MAX][WEIGHTS], loss[RANKS_MAX][STEPS];
    float at[STEPS + 1][RANKS_MAX][WEIGHTS]; /* w at the beginning of each step, and last at the end */
    char  what[128];
} dp_run;
static dp_run dp;

static float rounded(double x) { return (float)(round(64 * x) / 64); }

static double task_gradient(void *data, int first, int count, const float *w, float *g)
{
    const task *t    = (const task *)data;
    double      loss = 0;
    for (int k = 0; k < WEIGHTS; k++) g[k] = 0;
    for (int i = first; i < first + count; i++) {
        double error = -t->y[i];
        for (int k = 0; k < WEIGHTS; k++) error += (double)w[k] * t->x[i][k];
        for (int k = 0; k < WEIGHTS; k++) g[k] += rounded(2 * error * t->x[i][k]);
        loss += rounded(error * error);
    }
    return loss;
}

static double dp_gradient(void *data, int first, int count, const float *w, float *g)
{
    const int r = *(const int *)data;
    part     *a = &dp.parts[dp.step[r]][r];
    if (count < 0 || first < 0 || first + count > SAMPLES) {
        grade_fail("%s: rank %d asks for the gradient of %d samples from %d on, and there are %d samples", dp.what, r,
                   count, first, SAMPLES);
        grade_exit(GRADE_WRONG);
    }
    if (count > 0) *a = (part){ first, a->count + count, a->calls + 1 };
    return task_gradient(&dp.t, first, count, w, g);
}

hpml_status sum_of_all(hpml_comm *c, float *x, int n)
{
    dp.sums[hpml_comm_rank(c)]++;
    return hpml_allreduce(c, x, n, NULL);
}

static int dp_first(int step, int batch) { return step * batch % (SAMPLES + batch - 1 - (SAMPLES - 1) % batch); }
static int dp_count(int step, int batch)
{
    const int left = SAMPLES - dp_first(step, batch);
    return left < batch ? left : batch;
}

static hpml_status dp_rank(hpml_comm *c, void *user)
{
    int         r = hpml_comm_rank(c);
    hpml_status s = begin_training(c, dp.w[r]);
    memcpy(dp.at[0][r], dp.w[r], sizeof dp.w[r]);
    for (int k = 0; k < (user ? 0 : STEPS) && s == HPML_OK; k++) {
        dp.step[r] = k;
        s = train_step(c, dp_gradient, &r, dp_first(k, dp.batch), dp_count(k, dp.batch), dp.w[r], 0.0625f,
                       &dp.loss[r][k]);
        memcpy(dp.at[k + 1][r], dp.w[r], sizeof dp.w[r]);
    }
    return s;
}

static void dp_fill(int p, int batch)
{
    dp = (dp_run){ .p = p, .batch = batch };
    snprintf(dp.what, sizeof dp.what, "%d ranks, batches of %d, %d samples%s", p, batch, SAMPLES,
             p > batch ? " (ranks without samples take part in the sum as well)" : "");
    for (int r = 0; r < p; r++)
        for (int k = 0; k < WEIGHTS; k++) dp.w[r][k] = (float)grade_int(-16, 16) / 8;
    for (int i = 0; i < SAMPLES; i++) {
        dp.t.y[i] = (float)grade_int(-24, 24) / 8;
        for (int k = 0; k < WEIGHTS; k++) dp.t.x[i][k] = (float)grade_int(-8, 8) / 8;
    }
}

static bool dp_go(void *only_begin)
{
    hpml_launch_desc launch = ranks_clock(dp.p, 1e-6, 1e9);
    launch.only_messages    = false;
    return ranks_run(dp.what, &launch, dp_rank, only_begin);
}

static bool begins(void)
{
    for (int p = 1; p <= 6; p++) {
        float first[WEIGHTS];
        dp_fill(p, 10);
        memcpy(first, dp.w[0], sizeof first);
        if (!dp_go(first)) return false;
        for (int r = 0; r < p; r++)
            for (int k = 0; k < WEIGHTS; k++)
                if (dp.w[r][k] != first[k])
                    return grade_fail("%d ranks: after begin_training w[%d] of rank %d is %g, rank 0 began with %g: "
                                      "all ranks begin with the same weights, or they train different models", p, k, r,
                                      dp.w[r][k], first[k]);
    }
    return true;
}

/* One rank against a loop in double precision, step by step. */
static bool one_rank(void)
{
    for (int n = 0; n < 6; n++) {
        double w[WEIGHTS];
        dp_fill(1, grade_int(5, 20));
        for (int k = 0; k < WEIGHTS; k++) w[k] = dp.w[0][k];
        if (!dp_go(NULL)) return false;
        for (int step = 0; step < STEPS; step++) {
            const int    count = dp_count(step, dp.batch);
            float        at[WEIGHTS], g[WEIGHTS];
            for (int k = 0; k < WEIGHTS; k++) at[k] = (float)w[k];
            const double loss = task_gradient(&dp.t, dp_first(step, dp.batch), count, at, g) / count;
            if (fabs(dp.loss[0][step] - loss) > 0.02 * fmax(1, loss))
                return grade_fail("%s: the mean loss of step %d is %g, *loss is %g%s", dp.what, step, loss,
                                  dp.loss[0][step], fabs(dp.loss[0][step] - count * loss) < 0.1 ? ": the sum" : "");
            for (int k = 0; k < WEIGHTS; k++) w[k] -= 0.0625 * g[k] / count;
        }
        for (int k = 0; k < WEIGHTS; k++)
            if (!(fabs(dp.w[0][k] - w[k]) < 0.02))
                return grade_fail("%s: after %d steps w[%d] is %g and should be %g; a step is -rate times the sum of "
                                  "the gradients / the number of samples in this batch", dp.what, STEPS, k, dp.w[0][k],
                                  w[k]);
    }
    return true;
}

static bool parts(void)
{
    for (int p = 1; p <= 8; p++) {
        dp_fill(p, grade_int(8, 20));
        if (!dp_go(NULL)) return false;
        for (int step = 0; step < STEPS; step++) {
            const int first = dp_first(step, dp.batch), count = dp_count(step, dp.batch);
            int       used[SAMPLES] = { 0 };
            for (int r = 0; r < p; r++) {
                const part *a = &dp.parts[step][r];
                if (a->count < count / p || a->count > (count + p - 1) / p)
                    return grade_fail("%s: of a batch of %d samples rank %d takes %d; %d or %d are a fair share",
                                      dp.what, count, r, a->count, count / p, (count + p - 1) / p);
                for (int i = a->first; i < a->first + a->count; i++) used[i]++;
            }
            for (int i = 0; i < SAMPLES; i++)
                if (used[i] != (i >= first && i < first + count))
                    return grade_fail("%s, batch %d to %d: %d ranks compute the gradient of sample %d", dp.what, first,
                                      first + count - 1, used[i], i);
        }
    }
    return true;
}

/* Runs p ranks and one rank on the same numbers. */
static bool as_one_rank(int p, int batch)
{
    static dp_run many;
    const uint64_t state = grade_state;
    dp_fill(p, batch);
    if (!dp_go(NULL)) return false;
    many        = dp;
    grade_state = state;
    dp_fill(1, batch);
    dp.t = many.t; /* dp_fill has drawn fewer weights */
    if (!dp_go(NULL)) return false;
    for (int step = 0; step < STEPS; step++) {
        const int count = dp_count(step, batch);
        for (int r = 0; r < p; r++)
            if (many.loss[r][step] != dp.loss[0][step])
                return grade_fail("%s, step %d with %d samples: the loss is %.7g on rank %d, and %.7g if one rank does "
                                  "everything: add up sums, then divide by the samples of the whole batch, on all "
                                  "ranks", many.what, step, count, many.loss[r][step], r, dp.loss[0][step]);
        for (int i = 0; i < p * WEIGHTS; i++) {
            const float is = many.at[step + 1][i / WEIGHTS][i % WEIGHTS], expected = dp.at[step + 1][0][i % WEIGHTS];
            const float was = dp.at[step][0][i % WEIGHTS];
            if (is != expected && fabsf(is - was - (float)p * (expected - was)) < 0.01f * fabsf(is - was))
                return grade_fail("%s: a step is %d times as long as if one rank does everything: divide by the "
                                  "samples of the whole batch", many.what, p);
            if (is != expected)
                return grade_fail("%s, step %d with %d samples: w[%d] becomes %.7g on rank %d, and %.7g if one rank "
                                  "does everything: a mean of means counts the samples of small parts more than "
                                  "others; divide once, by the samples of the whole batch", many.what, step, count,
                                  i % WEIGHTS, is, i / WEIGHTS, expected);
        }
    }
    return true;
}

static bool same_bits(void)
{
    for (int p = 2; p <= 8; p *= 2)
        if (!as_one_rank(p, 8)) return false;
    return true;
}
static bool uneven(void)
{
    for (int p = 2; p <= 7; p++)
        if (!as_one_rank(p, 2 * p + grade_int(1, p - 1))) return false;
    return true;
}
static bool few_samples(void)
{
    for (int p = 5; p <= 9; p++)
        if (!as_one_rank(p, grade_int(2, 4))) return false;
    return true;
}

static bool one_sum(void)
{
    for (int p = 2; p <= 5; p++) {
        dp_fill(p, 10);
        if (!dp_go(NULL)) return false;
        for (int r = 0; r < p; r++)
            if (dp.sums[r] != STEPS)
                return grade_fail("%s: in %d steps rank %d calls sum_of_all %d times: one array can have the gradient "
                                  "and the loss", dp.what, STEPS, r, dp.sums[r]);
    }
    return true;
}

static const grade_case cases[] = {
    { "all ranks begin with the weights of rank 0", 10, begins },
    { "one rank: gradient descent", 20, one_rank },
    { "parts of a batch", 15, parts },
    { "the bits of one rank, equal parts", 20, same_bits },
    { "the bits of one rank, unequal parts", 15, uneven },
    { "more ranks than samples", 10, few_samples },
    { "one sum in a step", 10, one_sum },
};
int main(int argc, char **argv)
{
    ranks_deadlock = "all ranks have to call sum_of_all in each step, also those without samples";
    return GRADE("09 data parallelism", cases);
}
