/* Exercise 18: checks a block of two dense layers whose weights are divided over the ranks: its numbers against the
   same block on one rank, and that it adds up over ranks once in each direction. */
#include "../ranks.h"

/* y = relu(x a + a_bias) b + b_bias. Each rank has some columns of a and the same rows of b; x, y, dy and b_bias are
   the same on all ranks. */
typedef struct tensor_part {
    int          batch, in, hidden, out; /* hidden: of this rank */
    const float *a, *a_bias;             /* (in, hidden), (hidden) */
    const float *b, *b_bias;             /* (hidden, out), (out) */
} tensor_part;
typedef struct tensor_gradients {
    float *a, *a_bias, *b, *b_bias;      /* as in tensor_part: of this rank's weights; b_bias the same on all ranks */
    float *x;                            /* (batch, in), of the whole block, the same on all ranks */
} tensor_gradients;

/* Computes h, (batch, hidden), this rank's columns of relu(x a + a_bias), and y, (batch, out), the whole block's. */
hpml_status tensor_forward(hpml_comm *c, const tensor_part *t, const float *x, float *h, float *y);
/* Computes all gradients g from dy, (batch, out), and the h of the forward pass. dh: memory for (batch, hidden). */
hpml_status tensor_backward(hpml_comm *c, const tensor_part *t, const float *x, const float *h, const float *dy,
                            float *dh, const tensor_gradients *g);

enum { TENSOR_MAX = 8 };
static int     tensor_sums[TENSOR_MAX]; /* by each rank, since the last pass began */
static int64_t tensor_floats[TENSOR_MAX];

/* c, (m, n), becomes a b: of a, (m, k), and b, (k, n). */
static __attribute__((unused)) void multiply(float *c, const float *a, const float *b, int m, int k, int n)
{
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            double sum = 0;
            for (int l = 0; l < k; l++) sum += (double)a[i * k + l] * b[l * n + j];
            c[i * n + j] = (float)sum;
        }
}

/* c, (k, n), becomes a transposed times b: of a, (m, k), and b, (m, n). */
static __attribute__((unused)) void multiply_left_transposed(float *c, const float *a, const float *b, int m, int k,
                                                             int n)
{
    for (int i = 0; i < k; i++)
        for (int j = 0; j < n; j++) {
            double sum = 0;
            for (int l = 0; l < m; l++) sum += (double)a[l * k + i] * b[l * n + j];
            c[i * n + j] = (float)sum;
        }
}

/* c, (m, k), becomes a times b transposed: of a, (m, n), and b, (k, n). */
static __attribute__((unused)) void multiply_right_transposed(float *c, const float *a, const float *b, int m, int n,
                                                              int k)
{
    for (int i = 0; i < m; i++)
        for (int j = 0; j < k; j++) {
            double sum = 0;
            for (int l = 0; l < n; l++) sum += (double)a[i * n + l] * b[j * n + l];
            c[i * k + j] = (float)sum;
        }
}

/* Adds up x, n floats, over all ranks; every rank calls it and gets the sums. */
static __attribute__((unused)) hpml_status sum_over_ranks(hpml_comm *c, float *x, int n)
{
    const int    p = hpml_comm_size(c), me = hpml_comm_rank(c);
    const size_t bytes = (size_t)n * sizeof *x;
    hpml_status  status = HPML_OK;
    float       *other = (float *)malloc(bytes + 1);
    tensor_sums[me]++;
    tensor_floats[me] += n;
    if (!other) return HPML_ERR_MEMORY;
    for (int r = 1; r < p && me == 0 && status == HPML_OK; r++) {
        status = hpml_recv(c, r, 0, other, bytes);
        for (int i = 0; i < n && status == HPML_OK; i++) x[i] += other[i];
    }
    if (me > 0) status = hpml_send(c, 0, 0, x, bytes);
    for (int r = 1; r < p && me == 0 && status == HPML_OK; r++) status = hpml_send(c, r, 0, x, bytes);
    if (me > 0 && status == HPML_OK) status = hpml_recv(c, 0, 0, x, bytes);
    free(other);
    return status;
}

typedef struct tensor_run {
    int   p, batch, in, hidden, out;  /* hidden: of all ranks together */
    float *x, *a, *a_bias, *b, *b_bias, *dy;                          /* of the whole block */
    float *h, *y, *dh, *da, *da_bias, *db, *db_bias, *dx;             /* what one rank computes */
    tensor_part      part[TENSOR_MAX];
    tensor_gradients got[TENSOR_MAX];
    float           *part_x[TENSOR_MAX], *part_h[TENSOR_MAX], *part_y[TENSOR_MAX], *part_dh[TENSOR_MAX];
    int              sums[2][TENSOR_MAX];
    int64_t          floats[2][TENSOR_MAX];
    char             what[96];
} tensor_run;
static tensor_run tensor;

static float *tensor_new(const char *name, int n, bool fill)
{
    float *x = grade_floats(name, n);
    for (int i = 0; i < n && fill; i++) x[i] = (float)grade_int(-3, 3);
    return x;
}

/* Returns columns [at, at + n) of x, (rows, columns). */
static float *tensor_columns(const char *name, const float *x, int rows, int columns, int at, int n)
{
    float *part = grade_floats(name, rows * n);
    for (int i = 0; i < rows; i++) memcpy(part + i * n, x + i * columns + at, (size_t)n * sizeof *x);
    return part;
}

static void tensor_reference(void)
{
    tensor_run *t = &tensor;
    multiply(t->h, t->x, t->a, t->batch, t->in, t->hidden);
    for (int i = 0; i < t->batch * t->hidden; i++) t->h[i] = fmaxf(t->h[i] + t->a_bias[i % t->hidden], 0);
    multiply(t->y, t->h, t->b, t->batch, t->hidden, t->out);
    for (int i = 0; i < t->batch * t->out; i++) t->y[i] += t->b_bias[i % t->out];
    multiply_left_transposed(t->db, t->h, t->dy, t->batch, t->hidden, t->out);
    multiply_right_transposed(t->dh, t->dy, t->b, t->batch, t->out, t->hidden);
    for (int i = 0; i < t->batch * t->hidden; i++)
        if (t->h[i] <= 0) t->dh[i] = 0;
    multiply_left_transposed(t->da, t->x, t->dh, t->batch, t->in, t->hidden);
    multiply_right_transposed(t->dx, t->dh, t->a, t->batch, t->hidden, t->in);
    memset(t->da_bias, 0, (size_t)t->hidden * sizeof(float));
    memset(t->db_bias, 0, (size_t)t->out * sizeof(float));
    for (int i = 0; i < t->batch * t->hidden; i++) t->da_bias[i % t->hidden] += t->dh[i];
    for (int i = 0; i < t->batch * t->out; i++) t->db_bias[i % t->out] += t->dy[i];
}

static void tensor_fill(int p)
{
    tensor = (tensor_run){ .p = p, .batch = grade_int(2, 6), .in = grade_int(2, 7), .out = grade_int(2, 7) };
    tensor_run *t = &tensor;
    t->hidden = p * grade_int(1, 4) + grade_int(0, p - 1);
    snprintf(t->what, sizeof t->what, "%d ranks, batch %d, %d inputs, %d hidden, %d outputs", p, t->batch, t->in,
             t->hidden, t->out);
    t->x       = tensor_new("x", t->batch * t->in, true);
    t->a       = tensor_new("a", t->in * t->hidden, true);
    t->a_bias  = tensor_new("a_bias", t->hidden, true);
    t->b       = tensor_new("b", t->hidden * t->out, true);
    t->b_bias  = tensor_new("b_bias", t->out, true);
    t->dy      = tensor_new("dy", t->batch * t->out, true);
    t->h       = tensor_new("h", t->batch * t->hidden, false);
    t->y       = tensor_new("y", t->batch * t->out, false);
    t->dh      = tensor_new("dh", t->batch * t->hidden, false);
    t->da      = tensor_new("da", t->in * t->hidden, false);
    t->da_bias = tensor_new("da_bias", t->hidden, false);
    t->db      = tensor_new("db", t->hidden * t->out, false);
    t->db_bias = tensor_new("db_bias", t->out, false);
    t->dx      = tensor_new("dx", t->batch * t->in, false);
    tensor_reference();
    for (int r = 0; r < p; r++) {
        const int         at = (int)hpml_block(t->hidden, p, r), n = (int)hpml_block(t->hidden, p, r + 1) - at;
        tensor_gradients *g  = &t->got[r];
        t->part[r] = (tensor_part){ t->batch, t->in, n, t->out, tensor_columns("a", t->a, t->in, t->hidden, at, n),
                                    t->a_bias + at, t->b + at * t->out, t->b_bias };
        t->part_x[r]  = tensor_columns("x", t->x, t->batch, t->in, 0, t->in);
        t->part_h[r]  = tensor_new("h", t->batch * n, false);
        t->part_y[r]  = tensor_new("y", t->batch * t->out, false);
        t->part_dh[r] = tensor_new("dh", t->batch * n, false);
        g->a          = tensor_new("the gradient of a", t->in * n, false);
        g->a_bias     = tensor_new("the gradient of a_bias", n, false);
        g->b          = tensor_new("the gradient of b", n * t->out, false);
        g->b_bias     = tensor_new("the gradient of b_bias", t->out, false);
        g->x          = tensor_new("the gradient of x", t->batch * t->in, false);
    }
}

static bool tensor_backwards; /* do the cases run the backward pass as well? */

static void tensor_count(int pass, int r)
{
    tensor.sums[pass][r]   = tensor_sums[r];
    tensor.floats[pass][r] = tensor_floats[r];
    tensor_sums[r]         = 0;
    tensor_floats[r]       = 0;
}

static hpml_status tensor_rank(hpml_comm *c, void *user)
{
    const int          r = hpml_comm_rank(c);
    const tensor_part *t = &tensor.part[r];
    (void)user;
    hpml_status status = tensor_forward(c, t, tensor.part_x[r], tensor.part_h[r], tensor.part_y[r]);
    tensor_count(0, r);
    if (status != HPML_OK || !tensor_backwards) return status;
    status = tensor_backward(c, t, tensor.part_x[r], tensor.part_h[r], tensor.dy, tensor.part_dh[r], &tensor.got[r]);
    tensor_count(1, r);
    return status;
}

/* Compares got, (rows, n), with columns [at, at + n) of right, (rows, columns). All are whole numbers, so exactly. */
static bool tensor_same(const char *name, const char *hint, int rank, const float *got, const float *right, int rows,
                        int columns, int at, int n)
{
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < n; j++)
            if (got[i * n + j] != right[i * columns + at + j])
                return grade_fail("%s: %s of rank %d has %g in row %d, column %d, and one rank alone computes %g; %s",
                                  tensor.what, name, rank, got[i * n + j], i, j, right[i * columns + at + j], hint);
    return true;
}

static bool tensor_go(int p, bool backwards)
{
    const hpml_launch_desc launch = ranks_clock(p, 1e-6, 1e9);
    tensor_fill(p);
    tensor_backwards = backwards;
    return ranks_run(tensor.what, &launch, tensor_rank, NULL);
}

static bool forward(void)
{
    for (int p = 1; p <= TENSOR_MAX; p++) {
        if (!tensor_go(p, false)) return false;
        for (int r = 0; r < p; r++) {
            const int at = (int)hpml_block(tensor.hidden, p, r), n = tensor.part[r].hidden;
            if (!tensor_same("h", "its columns need no other rank", r, tensor.part_h[r], tensor.h, tensor.batch,
                             tensor.hidden, at, n) ||
                !tensor_same("y", "y is the sum of all ranks' products plus b_bias, once", r, tensor.part_y[r],
                             tensor.y, tensor.batch, tensor.out, 0, tensor.out))
                return false;
        }
    }
    return true;
}

static bool weight_gradients(void)
{
    for (int p = 1; p <= TENSOR_MAX; p++) {
        if (!tensor_go(p, true)) return false;
        for (int r = 0; r < p; r++) {
            const int               at = (int)hpml_block(tensor.hidden, p, r), n = tensor.part[r].hidden;
            const tensor_gradients *g = &tensor.got[r];
            if (!tensor_same("the gradient of b", "a rank has all it needs: its h, and dy", r, g->b,
                             tensor.db + at * tensor.out, n, tensor.out, 0, tensor.out) ||
                !tensor_same("the gradient of b_bias", "dy is the same on all ranks, so nothing has to be added up", r,
                             g->b_bias, tensor.db_bias, 1, tensor.out, 0, tensor.out) ||
                !tensor_same("the gradient of a", "is the derivative of relu in dh? Its columns need no other rank", r,
                             g->a, tensor.da, tensor.in, tensor.hidden, at, n) ||
                !tensor_same("the gradient of a_bias", "it is the sum of dh over the batch", r, g->a_bias,
                             tensor.da_bias, 1, tensor.hidden, at, n))
                return false;
        }
    }
    return true;
}

static bool input_gradient(void)
{
    for (int p = 1; p <= TENSOR_MAX; p++) {
        if (!tensor_go(p, true)) return false;
        for (int r = 0; r < p; r++)
            if (!tensor_same("the gradient of x", "x was used by all ranks, so its gradient is the sum of theirs", r,
                             tensor.got[r].x, tensor.dx, tensor.batch, tensor.in, 0, tensor.in))
                return false;
    }
    return true;
}

static bool one_sum_each_way(void)
{
    for (int p = 2; p <= TENSOR_MAX; p++) {
        if (!tensor_go(p, true)) return false;
        for (int r = 0; r < p; r++)
            for (int pass = 0; pass < 2; pass++) {
                const int64_t floats = tensor.batch * (pass == 0 ? tensor.out : tensor.in);
                if (tensor.sums[pass][r] != 1 || tensor.floats[pass][r] != floats)
                    return grade_fail("%s: the %s pass of rank %d adds up %lld floats in %d sums over ranks; one sum "
                                      "of the %lld floats of %s is enough", tensor.what,
                                      pass == 0 ? "forward" : "backward", r,
                                      (long long)tensor.floats[pass][r], tensor.sums[pass][r], (long long)floats,
                                      pass == 0 ? "y" : "the gradient of x");
            }
        int64_t messages = 0;
        for (int r = 0; r < p; r++) messages += rank_reports[r].count.messages;
        if (messages != 4 * (p - 1))
            return grade_fail("%s: %lld messages; both sums together are %d, and no others are needed", tensor.what,
                              (long long)messages, 4 * (p - 1));
    }
    return true;
}

static const grade_case cases[] = {
    { "forward pass", 30, forward },
    { "gradients of the weights", 25, weight_gradients },
    { "gradient of the input", 20, input_gradient },
    { "one sum over ranks in each direction", 25, one_sum_each_way },
};
int main(int argc, char **argv) { return GRADE("18 two dense layers over ranks", cases); }
