/* Exercise 15: checks training without locks on shared weights. The ranks are threads of one process in virtual time:
   one runs at a time, and each access to shared memory lets others run first, so lost updates are the same in each run
   and on each machine. */
#include "../ranks.h"

typedef struct hog_sample { /* a sparse sample: features index[0] to index[count - 1] are value[...], others are 0 */
    int   count, index[8];
    float value[8], label; /* 0 or 1 */
} hog_sample;

/* Adds `change` to the shared *x, so that no addition of any thread is lost, without a lock: no thread ever waits for
   another one. */
void hog_add(hpml_comm *c, float *x, float change);
/* One step of logistic regression on the shared weights w: z is the sum of value * w[index] over the sample's features,
   error = 1 / (1 + exp(-z)) - label, and each of the sample's weights changes by -lr * error * value, with hog_add.
   Accesses no other weights. */
void hog_step(hpml_comm *c, float *w, const hog_sample *s, float lr);

enum { HOG_RANKS = 8, HOG_WEIGHTS = 64 };
static const double hog_access_s = 1e-7; /* virtual seconds of an access to shared memory */
static float             *hog_w;         /* the shared weights */
static const hog_sample  *hog_current[HOG_RANKS]; /* the sample of which each rank does a step; NULL: any access */
static int64_t            hog_loads[HOG_RANKS], hog_swaps[HOG_RANKS], hog_failed[HOG_RANKS], hog_stores[HOG_RANKS];
static int64_t            hog_stop_at;   /* rank 0 stops after so many accesses; 0: never */
static char               hog_what[96];

/* Before an access: lets other threads run, and checks that the weight is one of the sample's. */
static __attribute__((unused)) void hog_access(hpml_comm *c, const float *x)
{
    const int         r = hpml_comm_rank(c);
    const hog_sample *s = hog_current[r];
    const int64_t     accesses = hog_loads[r] + hog_swaps[r] + hog_stores[r], at = x - hog_w;
    hpml_comm_compute(c, hog_access_s * (r == 0 && accesses > 0 && accesses == hog_stop_at ? 3000 : 1));
    if (!s || at < 0 || at >= HOG_WEIGHTS) return;
    for (int i = 0; i < s->count; i++)
        if (s->index[i] == at) return;
    grade_fail("%s: a step on a sample with %d features accesses weight %lld, which the sample does not have: sparse "
               "steps seldom meet at a weight, steps on all weights do each time", hog_what, s->count, (long long)at);
}

/* Reads the shared *x. In C: __atomic_load(x, &value, __ATOMIC_RELAXED). */
static __attribute__((unused)) float hog_load(hpml_comm *c, const float *x)
{
    float value;
    hog_access(c, x);
    __atomic_load(x, &value, __ATOMIC_RELAXED);
    hog_loads[hpml_comm_rank(c)]++;
    return value;
}

/* Sets the shared *x to `value`, whatever it is. In C: __atomic_store(x, &value, __ATOMIC_RELAXED). */
static __attribute__((unused)) void hog_store(hpml_comm *c, float *x, float value)
{
    hog_access(c, x);
    __atomic_store(x, &value, __ATOMIC_RELAXED);
    hog_stores[hpml_comm_rank(c)]++;
}

/* Sets the shared *x to `value` if it still is `expected`, and returns whether it was. In C:
   __atomic_compare_exchange. */
static __attribute__((unused)) bool hog_swap(hpml_comm *c, float *x, float expected, float value)
{
    hog_access(c, x);
    const bool done = __atomic_compare_exchange(x, &expected, &value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    hog_swaps[hpml_comm_rank(c)]++;
    hog_failed[hpml_comm_rank(c)] += !done;
    return done;
}

static hpml_launch_desc hog_begin(int ranks, const char *what)
{
    hpml_launch_desc launch = ranks_clock(ranks, 0, 0);
    launch.network.jitter = 1; /* an access takes one to two times as long, by chance */
    launch.network.seed   = grade_bits();
    memset(hog_loads, 0, sizeof hog_loads);
    memset(hog_swaps, 0, sizeof hog_swaps);
    memset(hog_failed, 0, sizeof hog_failed);
    memset(hog_stores, 0, sizeof hog_stores);
    memset(hog_current, 0, sizeof hog_current);
    hog_stop_at = 0;
    hog_w       = grade_floats("the shared weights", HOG_WEIGHTS);
    for (int i = 0; i < HOG_WEIGHTS; i++) hog_w[i] = 0;
    snprintf(hog_what, sizeof hog_what, "%d threads, %s", ranks, what);
    return launch;
}

/* ---- additions ---- */

enum { HOG_ADDS = 60 };

/* The control: an addition that can lose others. */
static void hog_lossy_add(hpml_comm *c, float *x, float change) { hog_store(c, x, hog_load(c, x) + change); }

static hpml_status hog_adder(hpml_comm *c, void *user)
{
    const bool lossy = *(const bool *)user;
    for (int i = 0; i < HOG_ADDS; i++) {
        float *x = hog_w + i % 2; /* two weights, so that threads meet */
        if (lossy) hog_lossy_add(c, x, (float)(1 + i % 3));
        else hog_add(c, x, (float)(1 + i % 3));
    }
    return HPML_OK;
}

static bool no_addition_is_lost(void)
{
    for (int p = 1; p <= HOG_RANKS; p++) {
        bool                   lossy  = false;
        const hpml_launch_desc launch = hog_begin(p, "60 additions each");
        if (!ranks_run(hog_what, &launch, hog_adder, &lossy)) return false;
        if (hog_w[0] + hog_w[1] != (float)(2 * HOG_ADDS * p))
            return grade_fail("%s: they add up to %d, and the weights have %g: an addition is lost when another thread "
                              "changes the weight between your load and your store; hog_swap sees this", hog_what,
                              2 * HOG_ADDS * p, hog_w[0] + hog_w[1]);
        if (p == 1) continue;
        lossy = true;
        const hpml_launch_desc again = hog_begin(p, "60 additions each");
        if (!ranks_run(hog_what, &again, hog_adder, &lossy)) return false;
        if (hog_w[0] + hog_w[1] >= (float)(2 * HOG_ADDS * p))
            return grade_fail("the checker's control, a load and a store, has lost nothing: please report this");
    }
    return true;
}

/* Rank 0 stops for as long as all the others need, after its first, second, third ... access. */
static bool no_thread_waits(void)
{
    for (int stop = 1; stop <= 6; stop++) {
        bool             lossy  = false;
        hpml_launch_desc launch = hog_begin(4, "60 additions each, of which thread 0 stops");
        hog_stop_at             = stop;
        launch.network.jitter   = 0;
        if (!ranks_run(hog_what, &launch, hog_adder, &lossy)) return false;
        for (int r = 1; r < 4; r++)
            if (rank_reports[r].end > 2000 * hog_access_s)
                return grade_fail("%s after its access number %d, for 3000 accesses: thread %d is ready after %.0f, so "
                                  "it has waited for thread 0; without a lock each thread goes on", hog_what, stop, r,
                                  rank_reports[r].end / hog_access_s);
    }
    return true;
}

static bool few_accesses(void)
{
    bool                   lossy  = false;
    const hpml_launch_desc launch = hog_begin(HOG_RANKS, "60 additions each");
    if (!ranks_run(hog_what, &launch, hog_adder, &lossy)) return false;
    for (int r = 0; r < HOG_RANKS; r++)
        if (hog_swaps[r] != HOG_ADDS + hog_failed[r] || hog_loads[r] > HOG_ADDS + hog_failed[r])
            return grade_fail("%s: thread %d uses %lld loads and %lld swaps, of which %lld fail; an addition is a load "
                              "and a swap, and both again when the swap fails", hog_what, r, (long long)hog_loads[r],
                              (long long)hog_swaps[r], (long long)hog_failed[r]);
    return true;
}

/* ---- steps ---- */

enum { HOG_SAMPLES = 400 };
static hog_sample hog_samples[HOG_SAMPLES];
static float      hog_truth[HOG_WEIGHTS];

static void hog_make_samples(void)
{
    for (int i = 0; i < HOG_WEIGHTS; i++) hog_truth[i] = (float)grade_real(-2, 2);
    for (int k = 0; k < HOG_SAMPLES; k++) {
        hog_sample *s = &hog_samples[k];
        double      z = 0;
        s->count = grade_int(2, 5);
        for (int i = 0; i < s->count; i++) {
            s->index[i] = (grade_int(0, 11) + 12 * i) % HOG_WEIGHTS; /* different ones */
            s->value[i] = (float)grade_real(0.5, 1.5);
            z += (double)s->value[i] * hog_truth[s->index[i]];
        }
        s->label = z > 0;
    }
}

static double hog_loss(const float *w)
{
    double sum = 0;
    for (int k = 0; k < HOG_SAMPLES; k++) {
        const hog_sample *s = &hog_samples[k];
        double            z = 0;
        for (int i = 0; i < s->count; i++) z += (double)s->value[i] * w[s->index[i]];
        sum += log(1 + exp(s->label > 0 ? -z : z));
    }
    return sum / HOG_SAMPLES;
}

static void hog_right_step(float *w, const hog_sample *s, float lr)
{
    float z = 0;
    for (int i = 0; i < s->count; i++) z += s->value[i] * w[s->index[i]];
    const float error = 1 / (1 + expf(-z)) - s->label;
    for (int i = 0; i < s->count; i++) w[s->index[i]] -= lr * error * s->value[i];
}

static hpml_status hog_trainer(hpml_comm *c, void *user)
{
    const int r = hpml_comm_rank(c), p = hpml_comm_size(c), steps = *(const int *)user;
    for (int k = r; k < steps; k += p) {
        hog_current[r] = &hog_samples[k % HOG_SAMPLES];
        hog_step(c, hog_w, hog_current[r], 0.3f);
    }
    return HPML_OK;
}

static bool one_thread(void)
{
    float w[HOG_WEIGHTS] = { 0 };
    int   steps = 50;
    hog_make_samples();
    const hpml_launch_desc launch = hog_begin(1, "50 steps");
    if (!ranks_run(hog_what, &launch, hog_trainer, &steps)) return false;
    for (int k = 0; k < steps; k++) hog_right_step(w, &hog_samples[k], 0.3f);
    for (int i = 0; i < HOG_WEIGHTS && !grade_text[0]; i++)
        if (!(fabsf(hog_w[i] - w[i]) < 1e-4f))
            return grade_fail("%s: weight %d is %g, expected %g: it changes by -lr * error * value, where error is "
                              "1 / (1 + exp(-z)) - label", hog_what, i, hog_w[i], w[i]);
    return !grade_text[0];
}

static bool sparse(void)
{
    int steps = 100;
    hog_make_samples();
    const hpml_launch_desc launch = hog_begin(4, "100 steps");
    if (!ranks_run(hog_what, &launch, hog_trainer, &steps) || grade_text[0]) return false;
    int64_t loads = 0, failed = 0, features = 0;
    for (int r = 0; r < 4; r++) loads += hog_loads[r];
    for (int r = 0; r < 4; r++) failed += hog_failed[r];
    for (int k = 0; k < steps; k++) features += hog_samples[k].count;
    if (loads > 2 * features + failed)
        return grade_fail("%s: %lld loads for %lld features; one for z and one in hog_add are enough", hog_what,
                          (long long)loads, (long long)features);
    return true;
}

static bool learns(void)
{
    float w[HOG_WEIGHTS] = { 0 };
    int   steps = 5 * HOG_SAMPLES;
    hog_make_samples();
    for (int k = 0; k < steps; k++) hog_right_step(w, &hog_samples[k % HOG_SAMPLES], 0.3f);
    const hpml_launch_desc launch = hog_begin(HOG_RANKS, "5 passes");
    if (!ranks_run(hog_what, &launch, hog_trainer, &steps) || grade_text[0]) return false;
    if (hog_loss(hog_w) > 1.1 * hog_loss(w))
        return grade_fail("%s: the loss is %g, and %g by one thread; is each sample's step complete?", hog_what,
                          hog_loss(hog_w), hog_loss(w));
    return true;
}

static const grade_case cases[] = {
    { "no addition is lost", 25, no_addition_is_lost },
    { "no thread waits for a stopped one", 20, no_thread_waits },
    { "accesses of an addition", 10, few_accesses },
    { "steps of one thread", 15, one_thread },
    { "touches the sample's weights alone", 15, sparse },
    { "learns like one thread", 15, learns },
};
int main(int argc, char **argv) { return GRADE("15 hogwild", cases); }
