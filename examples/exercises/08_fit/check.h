/* Exercise 08: checks measuring a network, fitting a model to it, and predicting with the model. */
#include "../ranks.h"

/* The model: a message of b bytes takes alpha + beta b seconds. */
typedef struct link_model {
    double alpha, beta; /* seconds; seconds a byte */
} link_model;

typedef struct timing {
    double bytes, seconds;
} timing;

/* Called by ranks 0 and 1: on rank 0 returns the seconds that a message of `bytes` bytes takes one way, half of a round
   trip by the clock hpml_comm_now; on rank 1 returns 0. buffer: `bytes` bytes. Clocks of two ranks may differ. */
double ping(hpml_comm *c, void *buffer, size_t bytes);

/* The model that fits t[0] to t[count - 1] with the smallest sum of squared *relative* errors,
   ((alpha + beta bytes) / seconds - 1)^2. */
link_model fit(const timing *t, int count);

/* What the model says of an allreduce of `bytes` bytes on p ranks. Ring: 2 (p - 1) messages of bytes / p. Doubling, p a
   power of two: log2 p messages of all bytes. */
double ring_seconds(link_model m, int p, double bytes);
double doubling_seconds(link_model m, int p, double bytes);

typedef struct ping_run {
    size_t bytes;
    double result[2];
} ping_run;
static ping_run one;

static hpml_status ping_rank(hpml_comm *c, void *user)
{
    const int r = hpml_comm_rank(c);
    (void)user;
    if (r == 1) hpml_comm_compute(c, 0.5); /* ranks do not begin at the same time */
    hpml_sendrecv(c, 1 - r, NULL, 0, 1 - r, NULL, 0, 1);
    one.result[r] = ping(c, grade_memory("buffer", one.bytes), one.bytes);
    return hpml_ctx_status(hpml_comm_ctx(c));
}

static bool ping_of(size_t bytes, double alpha, double bandwidth)
{
    const hpml_launch_desc launch = ranks_clock(2, alpha, bandwidth);
    char                   what[64];
    snprintf(what, sizeof what, "ping of %zu bytes", bytes);
    one = (ping_run){ .bytes = bytes };
    return ranks_run(what, &launch, ping_rank, NULL);
}

static bool pings(void)
{
    for (int k = 0; k < 12; k++) {
        const double alpha = grade_real(1e-6, 1e-4), bandwidth = grade_real(1e7, 1e9);
        const size_t bytes = (size_t)1 << (2 * k);
        const double exact = alpha + (double)bytes / bandwidth;
        if (!ping_of(bytes, alpha, bandwidth)) return false;
        if (fabs(one.result[0] - 2 * exact) < 1e-3 * exact)
            return grade_fail("a message of %zu bytes takes %.3g ms, ping says %.3g ms: this is there and back", bytes,
                              1e3 * exact, 1e3 * one.result[0]);
        if (!(fabs(one.result[0] - exact) < 1e-3 * exact))
            return grade_fail("a message of %zu bytes takes %.3g ms, ping says %.3g ms: rank 0 reads its own clock "
                              "before it sends and after the answer of the same size has come", bytes, 1e3 * exact,
                              1e3 * one.result[0]);
    }
    return true;
}

/* Timings from 4 bytes to 16 MB, each wrong by up to `noise` times itself. */
static int timings(timing *t, double alpha, double beta, double noise)
{
    int count = 0;
    for (double bytes = 4; bytes < 2e7; bytes *= 4, count++)
        t[count] = (timing){ bytes, (alpha + beta * bytes) * (1 + grade_real(-noise, noise)) };
    return count;
}

/* Fits links to timings with this noise; error: the largest relative error of what is found. */
static bool fits(double noise, double error, const char *hint)
{
    for (int k = 0; k < 20; k++) {
        timing           t[16];
        const double     alpha = grade_real(1e-6, 1e-4), beta = grade_real(1e-9, 1e-7);
        const link_model m = fit(t, timings(t, alpha, beta, noise));
        if (!(fabs(m.alpha / alpha - 1) < error && fabs(m.beta / beta - 1) < error))
            return grade_fail("timings with %g %% noise: alpha is %.6g s, the link has %.6g s; beta is %.6g s, the "
                              "link has %.6g s%s", 100 * noise, m.alpha, alpha, m.beta, beta, hint);
    }
    return true;
}
static bool fit_exact(void) { return fits(0, 1e-6, ""); }
static bool fit_noisy(void)
{
    return fits(0.05, 0.1, ". In a sum of squared seconds only the largest messages count: divide each error by its "
                "timing");
}

static bool formulas(void)
{
    for (int k = 0; k < 20; k++) {
        const link_model m = { grade_real(1e-6, 1e-4), grade_real(1e-9, 1e-7) };
        const int        log = grade_int(0, 6), p = 1 << log;
        const double     bytes = grade_real(1e2, 1e6), ring = 2 * (p - 1) * (m.alpha + m.beta * bytes / p);
        const double     doubling = log * (m.alpha + m.beta * bytes), r = ring_seconds(m, p, bytes);
        const double     d = doubling_seconds(m, p, bytes);
        if (!(fabs(r - ring) <= 1e-9 * ring))
            return grade_fail("ring, %d ranks, %.0f bytes: %g s and should be %g s", p, bytes, r, ring);
        if (!(fabs(d - doubling) <= 1e-9 * doubling))
            return grade_fail("doubling, %d ranks, %.0f bytes: %g s and should be %g s", p, bytes, d, doubling);
    }
    return true;
}

static hpml_status library_rank(hpml_comm *c, void *user)
{
    const hpml_allreduce_desc desc = { .algorithm = *(const hpml_algorithm *)user };
    float                    *x    = grade_floats("x", (int64_t)one.bytes / 4);
    memset(x, 0, one.bytes);
    return hpml_allreduce(c, x, (int64_t)one.bytes / 4, &desc);
}

/* Measures by ping, fits, predicts; the library's allreduce then takes as long as predicted, within a tenth. */
static bool prediction(void)
{
    for (int k = 0; k < 6; k++) {
        const double     alpha = grade_real(1e-6, 1e-4), bandwidth = grade_real(1e7, 1e9);
        const int        p = 4 << k % 3;
        timing           t[8];
        for (int i = 0; i < 8; i++) {
            if (!ping_of((size_t)4 << (3 * i), alpha, bandwidth)) return false;
            t[i] = (timing){ (double)one.bytes, one.result[0] };
        }
        const link_model m = fit(t, 8);
        one.bytes          = 4096u << 2 * k;
        for (int ring = 0; ring < 2; ring++) {
            hpml_algorithm   a      = ring ? HPML_RING : HPML_BUTTERFLY;
            hpml_launch_desc launch = ranks_clock(p, alpha, bandwidth);
            const double     said   = (ring ? ring_seconds : doubling_seconds)(m, p, (double)one.bytes);
            launch.only_messages    = false;
            if (!ranks_run("the library's allreduce", &launch, library_rank, &a)) return false;
            if (!(fabs(said / ranks_end(p) - 1) < 0.1))
                return grade_fail("%s, %d ranks, %zu bytes: your model says %.3g ms, measured are %.3g ms",
                                  ring ? "ring" : "doubling", p, one.bytes, 1e3 * said, 1e3 * ranks_end(p));
        }
    }
    return true;
}

static const grade_case cases[] = {
    { "ping", 25, pings },
    { "fit of timings without noise", 20, fit_exact },
    { "fit of timings with noise", 20, fit_noisy },
    { "formulas of two algorithms", 15, formulas },
    { "measure, fit, predict", 20, prediction },
};
int main(int argc, char **argv) { return GRADE("08 latency and bandwidth", cases); }
