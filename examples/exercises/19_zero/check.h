/* Exercise 19: checks ZeRO-1, data parallelism in which each rank keeps the optimizer's state of its part alone. */
#include "../ranks.h"

/* One step of Adam on all ranks. w: n weights, the same on all ranks before and after the step; g: this rank's
   gradient, may be overwritten; the step uses the mean of all ranks' gradients. m, v: the optimizer's state of this
   rank's part alone, block r of p blocks, that is hpml_block(n, p, r + 1) - hpml_block(n, p, r) floats each. step: 1,
   2, ... */
hpml_status zero_step(hpml_comm *c, float *w, float *g, int64_t n, float *m, float *v, int step, float lr);

enum { ZERO_MAX = 8, ZERO_STEPS = 5, ZERO_BEHIND = 7 }; /* BEHIND: what stands behind each rank's m and v */
static int zero_calls[2][ZERO_MAX]; /* by each rank: of reduce_scatter, of allgather */

static hpml_status zero_ring(hpml_comm *c, float *x, int64_t n, bool adds)
{
    const int    p = hpml_comm_size(c), me = hpml_comm_rank(c), right = (me + 1) % p, left = (me + p - 1) % p;
    hpml_status  status = HPML_OK;
    float       *spare  = (float *)malloc((size_t)(n / p + 2) * sizeof *x);
    for (int k = 0; k < p - 1 && spare && status == HPML_OK; k++) {
        const int     sent = (me + 2 * p - k - (adds ? 1 : 0)) % p, received = (sent + p - 1) % p;
        const int64_t from = hpml_block(n, p, sent), at = hpml_block(n, p, received);
        const size_t  out = (size_t)(hpml_block(n, p, sent + 1) - from) * sizeof *x;
        const int64_t in  = hpml_block(n, p, received + 1) - at;
        status = hpml_sendrecv(c, right, x + from, out, left, spare, (size_t)in * sizeof *x, 0);
        for (int64_t i = 0; i < in && status == HPML_OK; i++) x[at + i] = adds ? x[at + i] + spare[i] : spare[i];
    }
    free(spare);
    return spare ? status : HPML_ERR_MEMORY;
}

/* Block r of rank r becomes the sum of this block of all ranks; all other blocks become NaN: they are not complete. */
static __attribute__((unused)) hpml_status reduce_scatter(hpml_comm *c, float *x, int64_t n)
{
    const int   p = hpml_comm_size(c), me = hpml_comm_rank(c);
    hpml_status status = zero_ring(c, x, n, true);
    zero_calls[0][me]++;
    for (int64_t i = 0; i < n; i++)
        if (i < hpml_block(n, p, me) || i >= hpml_block(n, p, me + 1)) x[i] = NAN;
    return status;
}

/* Block r of rank r becomes block r of all ranks. */
static __attribute__((unused)) hpml_status allgather(hpml_comm *c, float *x, int64_t n)
{
    zero_calls[1][hpml_comm_rank(c)]++;
    return zero_ring(c, x, n, false);
}

/* Adam: changes the weights w by the gradient g, n floats each, and their state m, v. */
static void adam(float *w, const float *g, int64_t n, float *m, float *v, int step, float lr)
{
    const float c1 = 1 - powf(0.9f, (float)step), c2 = 1 - powf(0.999f, (float)step);
    for (int64_t i = 0; i < n; i++) {
        m[i] = 0.9f * m[i] + 0.1f * g[i];
        v[i] = 0.999f * v[i] + 0.001f * g[i] * g[i];
        w[i] -= lr * (m[i] / c1) / (sqrtf(v[i] / c2) + 1e-3f);
    }
}

typedef struct zero_run {
    int     p, steps;
    int64_t n;
    float  *w[ZERO_MAX], *g[ZERO_MAX], *m[ZERO_MAX], *v[ZERO_MAX], *gradient[ZERO_STEPS][ZERO_MAX];
    float  *right; /* (n) the weights in the end, by one rank with the mean of the gradients */
    char    what[96];
} zero_run;
static zero_run zero;

static void zero_reference(float *w)
{
    const size_t bytes = (size_t)zero.n * sizeof *w;
    float *g = grade_floats("the checker's gradient", zero.n), *m = grade_floats("the checker's m", zero.n);
    float *v = grade_floats("the checker's v", zero.n);
    memset(m, 0, bytes);
    memset(v, 0, bytes);
    for (int k = 0; k < zero.steps; k++) {
        for (int64_t i = 0; i < zero.n; i++) {
            double sum = 0;
            for (int r = 0; r < zero.p; r++) sum += zero.gradient[k][r][i];
            g[i] = (float)sum / (float)zero.p;
        }
        adam(w, g, zero.n, m, v, k + 1, 0.01f);
    }
}

static void zero_fill(int p, int64_t n, int steps)
{
    zero = (zero_run){ .p = p, .n = n, .steps = steps };
    memset(zero_calls, 0, sizeof zero_calls);
    snprintf(zero.what, sizeof zero.what, "%d ranks, %lld weights, %d steps", p, (long long)n, steps);
    zero.right = grade_floats("the checker's weights", n);
    for (int64_t i = 0; i < n; i++) zero.right[i] = (float)grade_real(-1, 1);
    for (int r = 0; r < p; r++) {
        const int64_t own = hpml_block(n, p, r + 1) - hpml_block(n, p, r);
        zero.w[r] = grade_floats("w", n);
        zero.g[r] = grade_floats("g", n);
        zero.m[r] = grade_floats("m", own + n); /* the last n must stay as they are */
        zero.v[r] = grade_floats("v", own + n);
        for (int64_t i = own; i < own + n; i++) zero.m[r][i] = zero.v[r][i] = ZERO_BEHIND;
        memcpy(zero.w[r], zero.right, (size_t)n * sizeof(float));
        memset(zero.m[r], 0, (size_t)own * sizeof(float));
        memset(zero.v[r], 0, (size_t)own * sizeof(float));
        for (int k = 0; k < steps; k++) {
            zero.gradient[k][r] = grade_floats("the checker's gradients", n);
            for (int64_t i = 0; i < n; i++) zero.gradient[k][r][i] = (float)grade_int(-50, 50) / 1024;
        }
    }
    zero_reference(zero.right);
}

static hpml_status zero_rank(hpml_comm *c, void *user)
{
    const int   r      = hpml_comm_rank(c);
    hpml_status status = HPML_OK;
    (void)user;
    for (int k = 0; k < zero.steps && status == HPML_OK; k++) {
        memcpy(zero.g[r], zero.gradient[k][r], (size_t)zero.n * sizeof(float));
        status = zero_step(c, zero.w[r], zero.g[r], zero.n, zero.m[r], zero.v[r], k + 1, 0.01f);
    }
    return status;
}

/* Is what stands behind each rank's block of m and v as it was? */
static bool zero_states(void)
{
    for (int r = 0; r < zero.p; r++) {
        const int64_t own = hpml_block(zero.n, zero.p, r + 1) - hpml_block(zero.n, zero.p, r);
        for (int64_t i = own; i < own + zero.n; i++) {
            const bool m_is_same = zero.m[r][i] == ZERO_BEHIND, v_is_same = zero.v[r][i] == ZERO_BEHIND;
            if (!m_is_same || !v_is_same)
                return grade_fail("%s: rank %d has written element %lld of %s, which has only this rank's block, %lld "
                                  "floats: its first element belongs to the first weight of the block", zero.what, r,
                                  (long long)i, m_is_same ? "v" : "m", (long long)own);
        }
    }
    return true;
}

static bool zero_go(int p, int64_t n, int steps)
{
    static const char own_block_alone[] = ": after reduce_scatter a rank has the sum of its own block alone";
    const hpml_launch_desc launch = ranks_clock(p, 1e-6, 1e9);
    zero_fill(p, n, steps);
    if (!ranks_run(zero.what, &launch, zero_rank, NULL) || !zero_states()) return false;
    for (int r = 0; r < p; r++)
        for (int64_t i = 0; i < n; i++) {
            const int own = i >= hpml_block(n, p, r) && i < hpml_block(n, p, r + 1);
            if (!(fabsf(zero.w[r][i] - zero.right[i]) <= 1e-5f))
                return grade_fail("%s: weight %lld of rank %d, %s, is %g, and %g by Adam on one rank with the mean of "
                                  "all gradients%s", zero.what, (long long)i, r,
                                  own ? "in its own block" : "in the block of another rank", zero.w[r][i],
                                  zero.right[i], isnan(zero.w[r][i]) ? own_block_alone : "");
        }
    return true;
}

static bool one_step(void)
{
    for (int p = 1; p <= ZERO_MAX; p++)
        if (!zero_go(p, p * grade_int(1, 20), 1)) return false;
    return true;
}

static bool any_size(void)
{
    for (int p = 1; p <= ZERO_MAX; p++)
        if (!zero_go(p, grade_int(1, 100), ZERO_STEPS) || !zero_go(p, p - 1, 2) || !zero_go(p, p + 1, 2)) return false;
    return true;
}

static bool same_bits(void)
{
    for (int p = 2; p <= ZERO_MAX; p *= 2) {
        if (!zero_go(p, 50 + p, ZERO_STEPS)) return false;
        for (int r = 0; r < p; r++)
            if (memcmp(zero.w[r], zero.right, (size_t)zero.n * sizeof(float)))
                return grade_fail("%s: rank %d's weights differ from one rank's in the last bits; the sums here are "
                                  "exact, so divide once, by the number of ranks, before adam", zero.what, r);
    }
    return true;
}

static bool bytes(void)
{
    for (int p = 2; p <= ZERO_MAX; p++) {
        const int64_t n = p * grade_int(5, 30), most = 2 * (p - 1) * (n / p) * 4;
        if (!zero_go(p, n, 1)) return false;
        for (int r = 0; r < p; r++) {
            if (rank_reports[r].count.bytes > most)
                return grade_fail("%s: rank %d has sent %lld bytes in a step; a reduce_scatter and an allgather are "
                                  "%lld, as many as an allreduce: gather the new weights, not the gradients as well",
                                  zero.what, r, (long long)rank_reports[r].count.bytes, (long long)most);
            if (zero_calls[0][r] != 1 || zero_calls[1][r] != 1)
                return grade_fail("%s: rank %d calls reduce_scatter %d times and allgather %d times in a step; one of "
                                  "each is enough", zero.what, r, zero_calls[0][r], zero_calls[1][r]);
        }
    }
    return true;
}

static const grade_case cases[] = {
    { "one step", 30, one_step },
    { "several steps, any size", 30, any_size },
    { "the bits of one rank", 15, same_bits },
    { "bytes of a step", 25, bytes },
};
int main(int argc, char **argv) { return GRADE("19 ZeRO-1", cases); }
