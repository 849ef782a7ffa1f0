/* Exercise 12: checks gradients of which only the largest numbers travel, with momentum correction. */
#include "../ranks.h"

typedef struct pair {
    int32_t index;
    float   value;
} pair;

/* What a rank keeps from step to step, (n) each, zeros at the start. */
typedef struct kept {
    float *velocity; /* u: momentum u + g in each step */
    float *unsent;   /* v: the velocities that have not been sent */
} kept;

/* Finds the k of the n numbers of v whose absolute values are the largest, 0 <= k <= n; of equal ones those with the
   smaller index. index[0] to index[k - 1] become their indices, in ascending order. */
void top_k(const float *v, int64_t n, int64_t k, int32_t *index);

/* u <- momentum u + g, v <- v + u. Then the k largest numbers of v go to out, in ascending order of their indices, and
   become 0 in v; u stays. */
void compress(pair *out, kept *state, const float *g, int64_t n, int64_t k, float momentum);

/* Every rank compresses g and sends its k pairs to all others. Then g is, on all ranks, the sum of all pairs, 0 where
   there are none, with the same bits. all: memory for p k pairs, those of rank r from all + r * k on. */
hpml_status topk_allreduce(hpml_comm *c, float *g, kept *state, int64_t n, int64_t k, float momentum, pair *all);

static float *numbers(const char *name, int64_t n, double size)
{
    float *x = grade_floats(name, n);
    for (int64_t i = 0; i < n; i++) x[i] = (float)grade_real(-size, size);
    return x;
}
static kept zeros(int64_t n)
{
    return (kept){ numbers("velocity", n, 0), numbers("unsent", n, 0) };
}

/* How many numbers come before v[i] in the order of size, and of index where sizes are equal. */
static int64_t place(const float *v, int64_t n, int64_t i)
{
    int64_t before = 0;
    for (int64_t j = 0; j < n; j++)
        if (fabsf(v[j]) > fabsf(v[i]) || (fabsf(v[j]) == fabsf(v[i]) && j < i)) before++;
    return before;
}

static bool select_of(float *v, int64_t n, int64_t k)
{
    int32_t *index = (int32_t *)grade_memory("index", (size_t)k * sizeof *index);
    float   *copy  = numbers("copy", n, 0);
    memcpy(copy, v, (size_t)n * sizeof(float));
    top_k(v, n, k, index);
    if (memcmp(copy, v, (size_t)n * sizeof(float))) return grade_fail("top_k has changed v");
    for (int64_t a = 0, i = 0; i < n; i++) {
        if (place(v, n, i) >= k) continue;
        if (index[a] != i)
            return grade_fail("%lld of %lld numbers: index[%lld] is %d and should be %lld: v there is %g, number %lld "
                              "by absolute value; indices ascend, and of equal numbers the first counts", (long long)k,
                              (long long)n, (long long)a, index[a], (long long)i, v[i], (long long)place(v, n, i) + 1);
        a++;
    }
    return true;
}

static bool selections(void)
{
    for (int trial = 0; trial < 40; trial++) {
        const int64_t n = grade_int(0, 300);
        float        *v = numbers("v", n, 1);
        for (int64_t i = 0; trial % 2 && i < n; i++) v[i] = (float)grade_int(-5, 5); /* many are equal */
        if (!select_of(v, n, trial < 4 ? n : grade_int(0, (int)n))) return false;
    }
    return true;
}

/* A step by the definition; v: what is unsent before the selection. */
static void exact_step(kept *own, float *v, const float *g, int64_t n, int64_t k, float momentum)
{
    for (int64_t i = 0; i < n; i++) {
        own->velocity[i] = momentum * own->velocity[i] + g[i];
        own->unsent[i] += own->velocity[i];
    }
    memcpy(v, own->unsent, (size_t)n * sizeof(float));
    for (int64_t i = 0; i < n; i++)
        if (place(v, n, i) < k) own->unsent[i] = 0;
}

static bool close_to(float a, float b) { return fabsf(a - b) <= 1e-5f; }

/* Are the pairs the k largest of v, and is the student's state the checker's? */
static bool same_step(const pair *out, const kept *state, const kept *own, const float *v, int64_t n, int64_t k)
{
    for (int64_t i = 0, next = 0; i < n; i++) {
        if (place(v, n, i) >= k) continue;
        if (out[next].index != i || !close_to(out[next].value, v[i]))
            return grade_fail("pair %lld of %lld is %g of number %d and should be %g of number %lld: is what has not "
                              "been sent added, and the velocity kept?", (long long)next, (long long)k, out[next].value,
                              out[next].index, v[i], (long long)i);
        next++;
    }
    for (int64_t i = 0; i < n; i++)
        if (!close_to(state->unsent[i], own->unsent[i]) || !close_to(state->velocity[i], own->velocity[i]))
            return grade_fail("of number %lld, which was %s, unsent is %g and should be %g, velocity is %g and should "
                              "be %g", (long long)i, place(v, n, i) < k ? "sent" : "not sent", state->unsent[i],
                              own->unsent[i], state->velocity[i], own->velocity[i]);
    return true;
}

static bool compressed(void)
{
    for (int trial = 0; trial < 6; trial++) {
        const int64_t n = grade_int(20, 200), k = grade_int(1, (int)n / 4);
        const float   momentum = trial % 2 ? 0.5f : 0;
        pair         *out      = (pair *)grade_memory("out", (size_t)k * sizeof *out);
        kept          state = zeros(n), own = zeros(n);
        float        *v = numbers("v", n, 0);
        for (int t = 0; t < 12; t++) {
            const float *g = numbers("g", n, 1);
            compress(out, &state, g, n, k, momentum);
            exact_step(&own, v, g, n, k, momentum);
            if (!same_step(out, &state, &own, v, n, k)) return false;
        }
    }
    return true;
}

/* With k = n everything is sent at once, so that the sums are the steps of SGD with momentum. */
static bool all_is_momentum(void)
{
    enum { N = 50, T = 20 };
    pair  *out      = (pair *)grade_memory("out", N * sizeof *out);
    kept   state    = zeros(N);
    float *velocity = numbers("the checker's velocity", N, 0);
    for (int t = 0; t < T; t++) {
        float *g = numbers("g", N, 1);
        compress(out, &state, g, N, N, 0.9f);
        for (int i = 0; i < N; i++) {
            velocity[i] = 0.9f * velocity[i] + g[i];
            if (fabsf(out[i].value - velocity[i]) > 1e-5f)
                return grade_fail("k = n, momentum 0.9, step %d: %g is sent of number %d, the velocity of SGD with "
                                  "momentum is %g%s", t, out[i].value, i, velocity[i],
                                  fabsf(out[i].value - g[i]) < 1e-5f ? ": this is the gradient alone" : "");
        }
    }
    return true;
}

/* Without momentum: what was sent in all steps, and what is unsent, are the sum of all gradients. */
static bool nothing_lost(void)
{
    enum { N = 100, K = 3, T = 60 };
    pair  *out   = (pair *)grade_memory("out", K * sizeof *out);
    kept   state = zeros(N);
    double all[N] = { 0 };
    float *sent = numbers("sent", N, 0);
    for (int t = 0; t < T; t++) {
        float *g = numbers("g", N, 1);
        for (int i = 0; i < N; i++) all[i] += g[i];
        compress(out, &state, g, N, K, 0);
        for (int i = 0; i < K; i++)
            if (out[i].index >= 0 && out[i].index < N) sent[out[i].index] += out[i].value;
    }
    for (int i = 0; i < N; i++)
        if (fabs(sent[i] + state.unsent[i] - all[i]) > 1e-3)
            return grade_fail("after %d steps the gradients of number %d have the sum %g, %g was sent, and %g is kept: "
                              "both together should be this sum", T, i, all[i], sent[i], state.unsent[i]);
    return true;
}

typedef struct topk_run {
    int     p;
    int64_t n, k;
    float  *g[RANKS_MAX];
    kept    state[RANKS_MAX];
    pair   *all[RANKS_MAX];
    char    what[64];
} topk_run;
static topk_run run;

static hpml_status sum_rank(hpml_comm *c, void *user)
{
    const int r = hpml_comm_rank(c);
    (void)user;
    return topk_allreduce(c, run.g[r], &run.state[r], run.n, run.k, 0.5f, run.all[r]);
}

/* sum (n): of what all ranks should send. */
static bool sum_go(const hpml_launch_desc *launch, int64_t n, int64_t k, float *sum)
{
    run = (topk_run){ .p = launch->ranks, .n = n, .k = k };
    snprintf(run.what, sizeof run.what, "%d ranks, %lld of %lld numbers", run.p, (long long)k, (long long)n);
    for (int64_t i = 0; i < n; i++) sum[i] = 0;
    for (int r = 0; r < run.p; r++) {
        run.g[r]     = numbers("g", n, 1 + r);
        run.state[r] = zeros(n);
        run.all[r]   = (pair *)grade_memory("all", (size_t)(run.p * k) * sizeof(pair));
        for (int64_t i = 0; i < n; i++)
            if (place(run.g[r], n, i) < k) sum[i] += run.g[r][i];
    }
    return ranks_run(run.what, launch, sum_rank, NULL);
}

static bool sums(void)
{
    for (int trial = 0; trial < 12; trial++) {
        const int              p      = trial < 8 ? trial + 1 : trial - 6; /* in virtual time, then as threads */
        const int64_t          n      = grade_int(200, 400);
        float                 *sum    = numbers("the checker's sum", n, 0);
        const hpml_launch_desc launch = trial < 8 ? ranks_clock(p, 1e-6, 1e9) : ranks_threads(p);
        if (!sum_go(&launch, n, grade_int(40, 90), sum)) return false;
        for (int r = 0; r < p; r++)
            for (int64_t i = 0; i < n; i++)
                if (!(fabsf(run.g[r][i] - sum[i]) <= 1e-5f * fmaxf(1, fabsf(sum[i]))))
                    return grade_fail("%s: number %lld of rank %d is %g, the sum of all pairs is %g", run.what,
                                      (long long)i, r, run.g[r][i], sum[i]);
        for (int r = 1; r < p; r++)
            if (memcmp(run.g[0], run.g[r], (size_t)n * sizeof(float)))
                return grade_fail("%s: ranks 0 and %d differ in the last bits: all add in the order of the ranks, "
                                  "their own pairs as well", run.what, r);
    }
    return true;
}

static bool bytes(void)
{
    for (int p = 2; p <= 8; p++) {
        const int64_t          n = grade_int(500, 900), k = n / 50, most = (p - 1) * k * (int64_t)sizeof(pair);
        const hpml_launch_desc clock = ranks_clock(p, 1e-6, 1e9);
        if (!sum_go(&clock, n, k, numbers("the checker's sum", n, 0))) return false;
        for (int r = 0; r < p; r++)
            if (rank_reports[r].count.bytes > most)
                return grade_fail("%s: rank %d has sent %lld bytes; %lld pairs, to %d others, have %lld", run.what, r,
                                  (long long)rank_reports[r].count.bytes, (long long)k, p - 1, (long long)most);
        if (ranks_depth(p) > p - 1)
            return grade_fail("%s: %lld messages follow each other, %d are enough", run.what, (long long)ranks_depth(p),
                              p - 1);
    }
    return true;
}

enum { FEATURES = 64, SENT = 4, SAMPLES = 512, BATCH = 32, TRAIN_STEPS = 600, TRAIN_RANKS = 4 };
typedef enum train_kind { TRAIN_DENSE, TRAIN_TOPK, TRAIN_FORGETS } train_kind;
static float  train_x[SAMPLES][FEATURES], train_y[SAMPLES], train_w[TRAIN_RANKS][FEATURES];
static double train_loss[3];

/* A linear model, momentum 0.9. TRAIN_FORGETS: what was not sent is set to 0 after each step. */
static hpml_status train_rank(hpml_comm *c, void *user)
{
    const train_kind kind = *(const train_kind *)user;
    const int        r    = hpml_comm_rank(c);
    float           *w = train_w[r], g[FEATURES], velocity[FEATURES] = { 0 };
    kept             state = zeros(FEATURES);
    pair            *all   = (pair *)grade_memory("all", TRAIN_RANKS * SENT * sizeof(pair));
    hpml_status      s     = HPML_OK;
    for (int k = 0; k < FEATURES; k++) w[k] = 0;
    for (int step = 0; step < TRAIN_STEPS && s == HPML_OK; step++) {
        for (int k = 0; k < FEATURES; k++) g[k] = 0;
        for (int b = 0; b < BATCH; b++) {
            const int i     = (int)((unsigned)((step * TRAIN_RANKS + r) * BATCH + b) * 2654435761u >> 7) % SAMPLES;
            float     error = -train_y[i];
            for (int k = 0; k < FEATURES; k++) error += w[k] * train_x[i][k];
            for (int k = 0; k < FEATURES; k++) g[k] += error * train_x[i][k] / BATCH;
        }
        if (kind == TRAIN_DENSE) s = hpml_allreduce(c, g, FEATURES, NULL);
        else s = topk_allreduce(c, g, &state, FEATURES, SENT, 0.9f, all);
        for (int k = 0; k < FEATURES; k++) {
            if (kind == TRAIN_FORGETS) state.unsent[k] = 0;
            velocity[k] = (kind == TRAIN_DENSE ? 0.9f * velocity[k] : 0) + g[k];
            w[k] -= 0.002f / TRAIN_RANKS * velocity[k];
        }
    }
    return s;
}

static bool training(void)
{
    for (int i = 0; i < SAMPLES; i++)
        for (int k = 0; k < FEATURES; k++) train_x[i][k] = (float)grade_real(-1, 1) * (k % 4 == 1 ? 3 : 1);
    for (int k = 0; k < FEATURES; k++) {
        const float weight = (float)grade_real(-1, 1);
        for (int i = 0; i < SAMPLES; i++) train_y[i] += weight * train_x[i][k];
    }
    for (int i = 0; i < SAMPLES; i++) train_y[i] += (float)grade_real(-0.1, 0.1);
    for (train_kind kind = TRAIN_DENSE; kind <= TRAIN_FORGETS; kind++) {
        hpml_launch_desc launch = ranks_clock(TRAIN_RANKS, 1e-6, 1e9);
        launch.only_messages    = kind != TRAIN_DENSE;
        if (!ranks_run("training", &launch, train_rank, &kind)) return false;
        train_loss[kind] = 0;
        for (int i = 0; i < SAMPLES; i++) {
            double error = -train_y[i];
            for (int k = 0; k < FEATURES; k++) error += train_w[0][k] * train_x[i][k];
            train_loss[kind] += error * error / SAMPLES;
        }
    }
    if (!(train_loss[TRAIN_TOPK] < 1.5 * train_loss[TRAIN_DENSE] + 1e-3))
        return grade_fail("%d steps with %d of %d numbers end at a loss of %.4f, with all numbers at %.4f: with "
                          "momentum correction both learn equally fast", TRAIN_STEPS, SENT, FEATURES,
                          train_loss[TRAIN_TOPK], train_loss[TRAIN_DENSE]);
    return train_loss[TRAIN_FORGETS] > 5 * train_loss[TRAIN_DENSE] ||
           grade_fail("if the checker forgets what was not sent, training ends at a loss of %.4f, and with all numbers "
                      "at %.4f: are they kept elsewhere?", train_loss[TRAIN_FORGETS], train_loss[TRAIN_DENSE]);
}

static const grade_case cases[] = {
    { "the k largest", 20, selections },
    { "a step: pairs, unsent numbers, velocity", 20, compressed },
    { "k = n is SGD with momentum", 10, all_is_momentum },
    { "nothing is lost, only late", 10, nothing_lost },
    { "sum over all ranks", 15, sums },
    { "bytes and messages", 10, bytes },
    { "training as with all numbers", 15, training },
};
int main(int argc, char **argv) { return GRADE("12 the largest numbers of a gradient", cases); }
