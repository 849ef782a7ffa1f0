/* Exercise 11: checks gradients of one bit with error feedback, and their sum over all ranks. */
#include "../ranks.h"

/* n numbers in one bit each. Bit i of the words, word[i / 32] >> (i % 32) & 1, is 1: number i is `high`, 0: `low`.
   Unused bits of the last word are 0. */
typedef struct onebit {
    float    low, high;
    uint32_t word[]; /* (n + 31) / 32 */
} onebit;
static inline size_t onebit_bytes(int64_t n) { return sizeof(onebit) + (size_t)(n + 31) / 32 * sizeof(uint32_t); }

/* Packs v = g + residual, n numbers: bit 1 where v >= 0; high is the mean of these v, low the mean of the others (0 if
   there are none). Afterwards residual is what was lost: v - the packed number. */
void onebit_encode(onebit *packed, float *residual, const float *g, int64_t n);

/* sum[i] += number i of `packed` */
void onebit_add(float *sum, const onebit *packed, int64_t n);

/* Every rank packs g, with its residual, and sends it packed to all others. Then g is, on all ranks, the sum of all
   packed gradients, with the same bits. all: memory for what the ranks send, rank r's at all + r * onebit_bytes(n). */
hpml_status onebit_allreduce(hpml_comm *c, float *g, float *residual, int64_t n, char *all);

static onebit *new_onebit(int64_t n) { return (onebit *)grade_memory("packed", onebit_bytes(n)); }

static float *new_numbers(const char *name, int64_t n, double size)
{
    float *x = grade_floats(name, n);
    for (int64_t i = 0; i < n; i++) x[i] = (float)grade_real(-size, size);
    return x;
}

/* Packs v as a student should; packed is the checker's own. */
static void exact_encode(onebit *packed, float *residual, const float *g, int64_t n)
{
    double  sum[2] = { 0, 0 };
    int64_t count[2] = { 0, 0 };
    memset(packed, 0, onebit_bytes(n));
    for (int64_t i = 0; i < n; i++) {
        const float v   = g[i] + residual[i];
        const int   bit = v >= 0;
        packed->word[i / 32] |= (uint32_t)bit << (i % 32);
        sum[bit] += v;
        count[bit]++;
    }
    packed->low  = count[0] ? (float)(sum[0] / (double)count[0]) : 0;
    packed->high = count[1] ? (float)(sum[1] / (double)count[1]) : 0;
    for (int64_t i = 0; i < n; i++)
        residual[i] += g[i] - (packed->word[i / 32] >> i % 32 & 1 ? packed->high : packed->low);
}

static bool near(double a, double b) { return fabs(a - b) <= 1e-4 * fmax(1, fabs(b)); }

static bool same_packed(const onebit *is, const onebit *expected, int64_t n, int step)
{
    for (int64_t i = 0; i < (n + 31) / 32; i++)
        if (is->word[i] != expected->word[i])
            return grade_fail("%lld numbers, step %d: word %lld of the bits is %08x and should be %08x%s", (long long)n,
                              step, (long long)i, is->word[i], expected->word[i],
                              step > 0 ? ": the sign is that of g + residual" : i == n / 32 && n % 32
                              ? ": the last word has bits for the last n % 32 numbers, and 0 behind them" : "");
    if (near(is->high, expected->high) && near(is->low, expected->low)) return true;
    return grade_fail("%lld numbers, step %d: low, high are %g, %g and should be %g, %g: the means of the negative v "
                      "and of the others (0 where there are none)", (long long)n, step, is->low, is->high,
                      expected->low, expected->high);
}

static bool encode_of(int64_t n, double shift)
{
    onebit *packed = new_onebit(n), *expected = (onebit *)calloc(1, onebit_bytes(n));
    float  *g = new_numbers("g", n, 1), *residual = grade_floats("residual", n), *own = grade_floats("own", n);
    for (int64_t i = 0; i < n; i++) {
        residual[i] = own[i] = 0;
        g[i] += (float)shift;
    }
    for (int step = 0; step < 3; step++) {
        exact_encode(expected, own, g, n);
        onebit_encode(packed, residual, g, n);
        if (!same_packed(packed, expected, n, step)) return false;
        for (int64_t i = 0; i < n; i++)
            if (!near(residual[i], own[i]))
                return grade_fail("%lld numbers, step %d: residual[%lld] is %g and should be %g: g + the old residual, "
                                  "less the packed number%s", (long long)n, step, (long long)i, residual[i], own[i],
                                  near(residual[i], -own[i]) ? "; the sign is wrong" : "");
        memcpy(residual, own, (size_t)n * sizeof(float)); /* an error of the last bit must not grow */
        for (int64_t i = 0; i < n; i++) g[i] = (float)grade_real(-1, 1);
    }
    return true;
}

static bool encode(void)
{
    for (int64_t n = 64; n <= 640; n += 64)
        if (!encode_of(n, 0)) return false;
    return true;
}

static bool any_size(void)
{
    static const int64_t sizes[] = { 0, 1, 2, 31, 32, 33, 63, 65, 1003 };
    for (int k = 0; k < 9; k++)
        if (!encode_of(sizes[k], 0)) return false;
    return encode_of(40, 5) && encode_of(40, -5);
}

static bool decode(void)
{
    for (int64_t n = 1; n < 80; n += 3) {
        onebit *packed = new_onebit(n);
        float  *sum = new_numbers("sum", n, 1), *before = grade_floats("before", n);
        memcpy(before, sum, (size_t)n * sizeof(float));
        packed->low  = -0.5f;
        packed->high = 0.25f;
        for (int64_t i = 0; i < (n + 31) / 32; i++) packed->word[i] = (uint32_t)grade_bits();
        onebit_add(sum, packed, n);
        for (int64_t i = 0; i < n; i++) {
            const float added = packed->word[i / 32] >> i % 32 & 1 ? 0.25f : -0.5f;
            if (sum[i] != before[i] + added)
                return grade_fail("onebit_add of %lld numbers: sum[%lld] was %g, this number is %g, and the sum "
                                  "becomes %g", (long long)n, (long long)i, before[i], added, sum[i]);
        }
    }
    return true;
}

/* What was packed in all steps, and the last residual, are the sum of all gradients: nothing is lost, only late. */
static bool nothing_lost(void)
{
    enum { N = 200, T = 50 };
    onebit *packed = new_onebit(N);
    float  *residual = grade_floats("residual", N), *sent = grade_floats("sent", N);
    double  all[N] = { 0 };
    for (int i = 0; i < N; i++) residual[i] = sent[i] = 0;
    for (int t = 0; t < T; t++) {
        float *g = new_numbers("g", N, t % 7 ? 1 : 10);
        for (int i = 0; i < N; i++) all[i] += g[i];
        onebit_encode(packed, residual, g, N);
        onebit_add(sent, packed, N);
    }
    for (int i = 0; i < N; i++)
        if (fabs(sent[i] + residual[i] - all[i]) > 1e-3)
            return grade_fail("after %d steps the gradients of number %d have the sum %g; sent were %g, and the "
                              "residual is %g: both together should be this sum, because what one step loses the next "
                              "one sends", T, i, all[i], sent[i], residual[i]);
    return true;
}

typedef struct onebit_run {
    int     p;
    int64_t n;
    float  *g[RANKS_MAX], *residual[RANKS_MAX];
    char   *all[RANKS_MAX], what[64];
} onebit_run;
static onebit_run run;

static hpml_status sum_rank(hpml_comm *c, void *user)
{
    const int r = hpml_comm_rank(c);
    (void)user;
    return onebit_allreduce(c, run.g[r], run.residual[r], run.n, run.all[r]);
}

/* Fills and runs; sum, n numbers: the sum of what all ranks should pack. */
static bool sum_go(const hpml_launch_desc *launch, int64_t n, float *sum)
{
    onebit *packed = (onebit *)calloc(1, onebit_bytes(n));
    float  *own    = (float *)calloc((size_t)n + 1, sizeof(float));
    run            = (onebit_run){ .p = launch->ranks, .n = n };
    snprintf(run.what, sizeof run.what, "%d ranks, %lld numbers", run.p, (long long)n);
    for (int64_t i = 0; i < n; i++) sum[i] = 0;
    for (int r = 0; r < run.p; r++) {
        run.g[r]        = new_numbers("g", n, 1 + r);
        run.residual[r] = new_numbers("residual", n, 1);
        run.all[r]      = (char *)grade_memory("all", (size_t)run.p * onebit_bytes(n));
        memcpy(own, run.residual[r], (size_t)n * sizeof(float));
        exact_encode(packed, own, run.g[r], n);
        for (int64_t i = 0; i < n; i++) sum[i] += packed->word[i / 32] >> i % 32 & 1 ? packed->high : packed->low;
    }
    return ranks_run(run.what, launch, sum_rank, NULL);
}

static bool sums(void)
{
    for (int k = 0; k < 12; k++) {
        const int              p      = k < 8 ? k + 1 : k - 6; /* 1 to 8 in virtual time, then 2 to 5 as threads */
        const int64_t          n      = grade_int(3000, 8000);
        float                 *sum    = grade_floats("the checker's sum", n);
        const hpml_launch_desc launch = k < 8 ? ranks_clock(p, 1e-6, 1e9) : ranks_threads(p);
        if (!sum_go(&launch, n, sum)) return false;
        for (int r = 0; r < p; r++)
            for (int64_t i = 0; i < n; i++)
                if (!near(run.g[r][i], sum[i]))
                    return grade_fail("%s: element %lld of rank %d is %g, the sum of all packed gradients is %g",
                                      run.what, (long long)i, r, run.g[r][i], sum[i]);
        for (int r = 1; r < p; r++)
            if (memcmp(run.g[0], run.g[r], (size_t)n * sizeof(float)))
                return grade_fail("%s: ranks 0 and %d differ in the last bits: all add in the order of the ranks, "
                                  "their own gradient as well, and as it was packed", run.what, r);
    }
    return true;
}

static bool bytes(void)
{
    for (int p = 2; p <= 8; p++) {
        const int64_t          n = grade_int(1000, 2000), most = (p - 1) * (int64_t)onebit_bytes(n);
        const hpml_launch_desc clock = ranks_clock(p, 1e-6, 1e9);
        if (!sum_go(&clock, n, grade_floats("the checker's sum", n))) return false;
        for (int r = 0; r < p; r++)
            if (rank_reports[r].count.bytes > most)
                return grade_fail("%s: rank %d has sent %lld bytes; packed, to %d others, the gradient has %lld",
                                  run.what, r, (long long)rank_reports[r].count.bytes, p - 1, (long long)most);
        if (ranks_depth(p) > p - 1)
            return grade_fail("%s: %lld messages follow each other, %d are enough", run.what,
                              (long long)ranks_depth(p), p - 1);
    }
    return true;
}

enum { FEATURES = 64, SAMPLES = 512, BATCH = 32, TRAIN_STEPS = 600, TRAIN_RANKS = 4 };
typedef enum train_kind { TRAIN_F32, TRAIN_ONEBIT, TRAIN_FORGETS } train_kind;
static float  train_x[SAMPLES][FEATURES], train_y[SAMPLES], train_w[TRAIN_RANKS][FEATURES];
static float  train_g[TRAIN_RANKS][FEATURES];
static double train_loss[3];

/* A linear model of inputs of different sizes; TRAIN_FORGETS sets the residual to 0 after each step. */
static hpml_status train_rank(hpml_comm *c, void *user)
{
    const train_kind kind = *(const train_kind *)user;
    const int        r    = hpml_comm_rank(c);
    float           *w = train_w[r], *g = train_g[r], *residual = (float *)calloc(FEATURES, sizeof(float));
    char            *all = (char *)grade_memory("all", TRAIN_RANKS * onebit_bytes(FEATURES));
    hpml_status      s   = HPML_OK;
    for (int k = 0; k < FEATURES; k++) w[k] = 0;
    for (int step = 0; step < TRAIN_STEPS && s == HPML_OK; step++) {
        for (int k = 0; k < FEATURES; k++) g[k] = 0;
        for (int b = 0; b < BATCH; b++) {
            const int i     = (int)((unsigned)((step * TRAIN_RANKS + r) * BATCH + b) * 2654435761u >> 7) % SAMPLES;
            float     error = -train_y[i];
            for (int k = 0; k < FEATURES; k++) error += w[k] * train_x[i][k];
            for (int k = 0; k < FEATURES; k++) g[k] += error * train_x[i][k] / BATCH;
        }
        if (kind == TRAIN_F32) s = hpml_allreduce(c, g, FEATURES, NULL);
        else s = onebit_allreduce(c, g, residual, FEATURES, all);
        if (kind == TRAIN_FORGETS) memset(residual, 0, FEATURES * sizeof(float));
        for (int k = 0; k < FEATURES; k++) w[k] -= 0.032f / TRAIN_RANKS * g[k];
    }
    free(residual);
    return s;
}

static bool training(void)
{
    for (int i = 0; i < SAMPLES; i++)
        for (int k = 0; k < FEATURES; k++) train_x[i][k] = (float)grade_real(-1, 1) * (k % 4 == 1 ? 3 : 1);
    for (int k = 0; k < FEATURES; k++) {
        const float weight = (float)grade_real(-1, 1) * (k % 8 == 0 ? 10 : 0.3f);
        for (int i = 0; i < SAMPLES; i++) train_y[i] += weight * train_x[i][k];
    }
    for (int i = 0; i < SAMPLES; i++) train_y[i] += (float)grade_real(-0.1, 0.1);
    for (train_kind kind = TRAIN_F32; kind <= TRAIN_FORGETS; kind++) {
        hpml_launch_desc launch = ranks_clock(TRAIN_RANKS, 1e-6, 1e9);
        launch.only_messages    = kind != TRAIN_F32;
        if (!ranks_run("training", &launch, train_rank, &kind)) return false;
        train_loss[kind] = 0;
        for (int i = 0; i < SAMPLES; i++) {
            double error = -train_y[i];
            for (int k = 0; k < FEATURES; k++) error += train_w[0][k] * train_x[i][k];
            train_loss[kind] += error * error / SAMPLES;
        }
    }
    if (!(train_loss[TRAIN_ONEBIT] < 1.5 * train_loss[TRAIN_F32] + 1e-3))
        return grade_fail("%d steps with 1 bit end at a loss of %.4f, with floats at %.4f, with 1 bit and no residual "
                          "at %.4f: with error feedback 1 bit is as good as floats", TRAIN_STEPS,
                          train_loss[TRAIN_ONEBIT], train_loss[TRAIN_F32], train_loss[TRAIN_FORGETS]);
    return train_loss[TRAIN_FORGETS] > 5 * train_loss[TRAIN_F32] ||
           grade_fail("if the checker forgets the residual, training ends at a loss of %.4f, and with floats at %.4f: "
                      "is the residual kept elsewhere?", train_loss[TRAIN_FORGETS], train_loss[TRAIN_F32]);
}

static const grade_case cases[] = {
    { "bits, low, high and residual", 25, encode },
    { "any number of gradients, only one sign", 10, any_size },
    { "unpack and add", 10, decode },
    { "nothing is lost, only late", 15, nothing_lost },
    { "sum over all ranks", 15, sums },
    { "bytes and messages", 10, bytes },
    { "training as with floats", 15, training },
};
int main(int argc, char **argv) { return GRADE("11 one bit with error feedback", cases); }
