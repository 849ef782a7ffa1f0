/* Exercise 16: checks gossip: mixing weights, one step of averaging with neighbours, how fast it agrees. */
#include "../ranks.h"

enum { GOSSIP_MAX = 16 };

typedef struct gossip_graph {
    int  p;
    bool edge[GOSSIP_MAX][GOSSIP_MAX]; /* edge[i][j]: ranks i and j are neighbours; symmetric; never edge[i][i] */
} gossip_graph;

/* Sets w, the mixing matrix (p, p), to the Metropolis weights of g: for neighbours i and j 1 / (1 + the larger number
   of neighbours of i and j), 0 for others, and on the diagonal what is missing to 1 in the row. */
void gossip_weights(const gossip_graph *g, double *w);
/* One step on this rank i: x, n floats, becomes the sum over j of w[i * p + j] times rank j's x as it was before the
   step. Exchanges messages with neighbours only, all at the same time. spare: memory for p * n floats. */
hpml_status gossip_step(hpml_comm *c, const gossip_graph *g, const double *w, float *x, int64_t n, float *spare);
/* Returns the largest |eigenvalue| of w, symmetric (p, p), besides the eigenvalue 1 of the vector (1, 1, ..., 1): the
   factor by which one step shrinks the differences between ranks, at worst. */
double gossip_lambda(const double *w, int p);

typedef struct gossip_run {
    const char        *name;
    gossip_graph       g;
    double             w[GOSSIP_MAX * GOSSIP_MAX];
    int64_t            n;
    int                steps;
    float             *x[GOSSIP_MAX], *spare[GOSSIP_MAX];
} gossip_run;
static gossip_run gossip;

static void gossip_connect(int i, int j) { gossip.g.edge[i][j] = gossip.g.edge[j][i] = true; }

/* A graph of `kind`: 0 ring, 1 path, 2 star, 3 all with all, 4 a path with random edges more. */
static void gossip_graph_of(int kind, int p)
{
    static const char *const names[] = { "ring", "path", "star", "all with all", "path and random edges" };
    memset(&gossip, 0, sizeof gossip);
    gossip.name = names[kind];
    gossip.g.p  = p;
    for (int i = 0; i < p; i++)
        for (int j = 0; j < i; j++)
            if (kind == 3 || (kind == 2 && j == 0) || (kind < 2 && i == j + 1) || (kind == 0 && i - j == p - 1) ||
                (kind == 4 && (i == j + 1 || grade_int(0, 3) == 0)))
                gossip_connect(i, j);
}

static int gossip_degree(int i)
{
    int degree = 0;
    for (int j = 0; j < gossip.g.p; j++) degree += gossip.g.edge[i][j];
    return degree;
}

static void gossip_right_weights(double *w)
{
    const int p = gossip.g.p;
    for (int i = 0; i < p; i++) {
        w[i * p + i] = 1;
        for (int j = 0; j < p; j++) {
            if (j == i) continue;
            w[i * p + j] = gossip.g.edge[i][j] ? 1.0 / (1 + fmax(gossip_degree(i), gossip_degree(j))) : 0;
            w[i * p + i] -= w[i * p + j];
        }
    }
}

static bool weights(void)
{
    for (int kind = 0; kind < 5; kind++)
        for (int p = 2; p <= 9; p++) {
            double right[GOSSIP_MAX * GOSSIP_MAX];
            gossip_graph_of(kind, p);
            gossip_right_weights(right);
            for (int i = 0; i < p * p; i++) gossip.w[i] = NAN;
            gossip_weights(&gossip.g, gossip.w);
            for (int j = 0; j < p; j++) {
                double sum = 0;
                for (int i = 0; i < p; i++) sum += gossip.w[i * p + j];
                if (!(fabs(sum - 1) < 1e-9))
                    return grade_fail("%s of %d ranks: column %d of w adds up to %g, not 1: so a step changes the mean "
                                      "of all ranks; the weight of an edge must be the same in both directions",
                                      gossip.name, p, j, sum);
            }
            for (int i = 0; i < p * p; i++)
                if (!(fabs(gossip.w[i] - right[i]) < 1e-9))
                    return grade_fail("%s of %d ranks: w of ranks %d and %d is %g, expected %g", gossip.name, p, i / p,
                                      i % p, gossip.w[i], right[i]);
        }
    return true;
}

static hpml_status gossip_rank(hpml_comm *c, void *user)
{
    const int   r      = hpml_comm_rank(c);
    hpml_status status = HPML_OK;
    (void)user;
    for (int k = 0; k < gossip.steps && status == HPML_OK; k++)
        status = gossip_step(c, &gossip.g, gossip.w, gossip.x[r], gossip.n, gossip.spare[r]);
    return status;
}

/* Runs gossip.steps steps on n random floats and compares them with the product of w, in double precision. */
static bool gossip_go(const hpml_launch_desc *launch, int64_t n, int steps)
{
    const int p = gossip.g.p;
    char      what[96];
    double   *x = (double *)grade_memory("the checker's x", 2 * (size_t)(p * n) * sizeof(double)), *y = x + p * n;
    snprintf(what, sizeof what, "%s of %d ranks, %lld floats, %d steps", gossip.name, p, (long long)n, steps);
    gossip.n     = n;
    gossip.steps = steps;
    gossip_right_weights(gossip.w);
    for (int r = 0; r < p; r++) {
        gossip.x[r]     = grade_floats("x", n);
        gossip.spare[r] = grade_floats("spare", p * n);
        for (int64_t i = 0; i < n; i++) x[r * n + i] = gossip.x[r][i] = (float)grade_int(-100, 100);
    }
    if (!ranks_run(what, launch, gossip_rank, NULL)) return false;
    for (int k = 0; k < steps; k++) {
        memset(y, 0, (size_t)(p * n) * sizeof *y);
        for (int r = 0; r < p; r++)
            for (int j = 0; j < p; j++)
                for (int64_t i = 0; i < n; i++) y[r * n + i] += gossip.w[r * p + j] * x[j * n + i];
        memcpy(x, y, (size_t)(p * n) * sizeof *x);
    }
    for (int r = 0; r < p; r++)
        for (int64_t i = 0; i < n; i++)
            if (!(fabs(gossip.x[r][i] - x[r * n + i]) < 1e-3))
                return grade_fail("%s: x[%lld] of rank %d is %g, expected %g, the sum over j of w[r * p + j] times "
                                  "rank j's x before the step: a rank sends what it had before the step, and its "
                                  "own x has a weight, too", what, (long long)i, r, gossip.x[r][i], x[r * n + i]);
    return true;
}

static bool one_step(void)
{
    for (int kind = 0; kind < 5; kind++)
        for (int p = 2; p <= 7; p++) {
            const hpml_launch_desc launch = ranks_clock(p, 1e-6, 1e9);
            gossip_graph_of(kind, p);
            if (!gossip_go(&launch, grade_int(1, 50), 1)) return false;
        }
    return true;
}

static bool several_steps(void)
{
    for (int kind = 0; kind < 5; kind++) {
        const hpml_launch_desc launch = ranks_clock(6, 1e-6, 1e9);
        gossip_graph_of(kind, 6);
        if (!gossip_go(&launch, grade_int(1, 50), 4)) return false;
    }
    return true;
}

static bool as_threads(void)
{
    for (int kind = 0; kind < 3; kind++) {
        const hpml_launch_desc launch = ranks_threads(4);
        gossip_graph_of(kind, 4);
        if (!gossip_go(&launch, 1000, 1)) return false;
    }
    return true;
}

static bool neighbours(void)
{
    for (int kind = 0; kind < 5; kind++) {
        const hpml_launch_desc launch = ranks_clock(7, 1e-6, 1e9);
        gossip_graph_of(kind, 7);
        if (!gossip_go(&launch, 10, 1)) return false;
        for (int i = 0; i < 7; i++)
            for (int j = 0; j < 7; j++) {
                const int64_t sent = rank_reports[i].messages_to[j];
                if (sent != (gossip.g.edge[i][j] ? 1 : 0))
                    return grade_fail("%s of 7 ranks: rank %d has sent %lld messages to rank %d, which is %s "
                                      "neighbour: one message to each neighbour, none to others", gossip.name, i,
                                      (long long)sent,
                                      j, gossip.g.edge[i][j] ? "its" : "not its");
            }
    }
    return true;
}

/* A message takes one second, so the time is the longest chain of messages that wait one for another. */
static bool at_the_same_time(void)
{
    for (int p = 4; p <= 12; p += 4) {
        const hpml_launch_desc launch = ranks_clock(p, 1, 0);
        gossip_graph_of(0, p);
        if (!gossip_go(&launch, 5, 1)) return false;
        if (ranks_end(p) > 1.5)
            return grade_fail("ring of %d ranks: %g messages wait one for another, and none has to: begin all receives "
                              "and sends, then wait for them; a rank that talks to one neighbour after the other "
                              "waits for that neighbour's neighbours as well", p, ranks_end(p));
    }
    return true;
}

/* The largest |eigenvalue| besides the 1 of (1, ..., 1), by Jacobi rotations of w - 1/p, in which that one is 0.
   *gap: its distance to the next smaller |eigenvalue|. */
static double gossip_right_lambda(const double *w, int p, double *gap)
{
    double a[GOSSIP_MAX][GOSSIP_MAX], largest = 0, next = 0;
    for (int i = 0; i < p; i++)
        for (int j = 0; j < p; j++) a[i][j] = w[i * p + j] - 1.0 / p;
    for (int sweep = 0; sweep < 30; sweep++)
        for (int i = 0; i < p; i++)
            for (int j = 0; j < i; j++) {
                const double angle = 0.5 * atan2(2 * a[i][j], a[i][i] - a[j][j]), s = sin(angle), c = cos(angle);
                for (int k = 0; k < p; k++) {
                    const double u = a[k][i], v = a[k][j];
                    a[k][i] = c * u + s * v;
                    a[k][j] = c * v - s * u;
                }
                for (int k = 0; k < p; k++) {
                    const double u = a[i][k], v = a[j][k];
                    a[i][k] = c * u + s * v;
                    a[j][k] = c * v - s * u;
                }
            }
    for (int i = 0; i < p; i++) {
        const double size = fabs(a[i][i]);
        next    = fmax(next, fmin(size, largest));
        largest = fmax(largest, size);
    }
    *gap = largest - next;
    return largest;
}

static bool lambda_is(const char *name, const double *w, int p, double right)
{
    const double got = gossip_lambda(w, p);
    if (fabs(got - right) < 1e-4) return true;
    return grade_fail("%s of %d ranks: lambda is %g, expected %g%s", name, p, got, right,
                      fabs(got - 1) < 1e-4 ? ": the eigenvalue 1 belongs to (1, ..., 1), the ranks that agree; take "
                                             "the mean out of the vector in each step" : "");
}

static bool eigenvalues(void)
{
    const double pi = 3.14159265358979323846;
    for (int p = 3; p <= 12; p++) {
        double right, gap;
        gossip_graph_of(0, p);
        gossip_right_weights(gossip.w);
        if (!lambda_is("ring", gossip.w, p, (1 + 2 * cos(2 * pi / p)) / 3)) return false;
        gossip_graph_of(2, p);
        gossip_right_weights(gossip.w);
        if (!lambda_is("star", gossip.w, p, 1 - 1.0 / p)) return false;
        gossip_graph_of(3, p);
        gossip_right_weights(gossip.w);
        if (!lambda_is("all with all", gossip.w, p, 0)) return false;
        do { /* not two eigenvalues that nearly agree, because power iteration would take thousands of steps */
            gossip_graph_of(4, p);
            gossip_right_weights(gossip.w);
            right = gossip_right_lambda(gossip.w, p, &gap);
        } while (gap > 1e-9 && gap < 0.01);
        if (!lambda_is("path and random edges", gossip.w, p, right)) return false;
    }
    return true;
}

/* Rings in which each rank takes almost all from its neighbours and nothing from itself: the largest |eigenvalue| is
   negative. */
static bool negative_eigenvalues(void)
{
    for (int p = 4; p <= 8; p += 2) {
        gossip_graph_of(0, p);
        for (int i = 0; i < p; i++)
            for (int j = 0; j < p; j++) {
                gossip.w[i * p + j] = gossip.g.edge[i][j] ? 0.49 : 0;
                if (i == j) gossip.w[i * p + j] = 0.02;
            }
        if (!lambda_is("ring with 0.02 on the diagonal, whose smallest eigenvalue is -0.96,", gossip.w, p, 0.96))
            return false;
    }
    return true;
}

static const grade_case cases[] = {
    { "mixing weights", 20, weights },
    { "one step", 20, one_step },
    { "several steps", 10, several_steps },
    { "sends that wait for their receives", 10, as_threads },
    { "talks to its neighbours alone", 10, neighbours },
    { "all messages at the same time", 10, at_the_same_time },
    { "second eigenvalue", 10, eigenvalues },
    { "negative eigenvalues", 10, negative_eigenvalues },
};
int main(int argc, char **argv) { return GRADE("16 gossip", cases); }
