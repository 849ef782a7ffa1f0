/* What you learn: L-BFGS on many ranks, whose coordinator hands out small portions of the work, so that a slow rank
   delays no step (Sandblaster: Dean et al. 2012, "Large Scale Distributed Deep Networks"). Difficulty 4 of 4.
   cc -O2 examples/20_lbfgs.c -o lbfgs -lm -lpthread && ./lbfgs
   mpicc -O2 -DHPML_USE_MPI examples/20_lbfgs.c -o lbfgs -lm -lpthread && HPML_RUN=mpi mpiexec -n 4 ./lbfgs
   Sparse logistic regression: 20,000 weights, 40,000 samples of 20 features each. Rank 0 coordinates: it sends numbers
   of portions and answers, never arrays. The other ranks compute losses and gradients of portions, as many as they
   manage. The vectors of L-BFGS are cut into blocks, one for each rank; products of vectors are sums over ranks.
   prints the loss of each step, the difference to one rank alone, and who computed how much when a worker is 10 times
   slower; virtual time. Exit 1 if ranks find other weights than one rank alone, or the slow worker costs too much. */
#define HPML_IMPLEMENTATION
#include "../hpml_comm.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WEIGHTS = 20000, SAMPLES = 40000, FEATURES = 20, PORTION = 200, PORTIONS = SAMPLES / PORTION };
enum { HISTORY = 8, STEPS = 15, MOST_RANKS = 64 };
enum { TAG_REQUEST, TAG_ANSWER };
static const double L2 = 1e-4, PORTION_SECONDS = 0.01;

static int32_t feature[SAMPLES][FEATURES]; /* sample i is 1 at these features, else 0 */
static double  target[SAMPLES];            /* 0 or 1 */

static void make_samples(void)
{
    hpml_rng rng = { .seed = 9 };
    for (int i = 0; i < SAMPLES; i++) {
        double z = 0;
        for (int k = 0; k < FEATURES; k++) {
            feature[i][k] = (int32_t)hpml_rng_below(&rng, WEIGHTS);
            hpml_rng truth = { .seed = 5, .stream = (uint64_t)feature[i][k] };
            z += 2 * hpml_rng_uniform(&truth) - 1;
        }
        target[i] = hpml_rng_uniform(&rng) < 1 / (1 + exp(-z));
    }
}

/* What all ranks share with main: results of rank 0. */
typedef struct job {
    int    quiet, portions[MOST_RANKS];
    double loss, seconds, w[WEIGHTS];
} job;

typedef struct solver {
    hpml_comm *c;
    job       *j;
    int        rank, ranks, begin, count; /* this rank's block of all vectors: `count` floats from `begin` on */
    double     w[WEIGHTS], g[WEIGHTS];    /* whole weights; sum of gradients: valid in this rank's block */
    double    *s[HISTORY], *y[HISTORY], inverse[HISTORY]; /* (count) steps, changes of the gradient; 1 / s y */
    int64_t    pairs;                     /* pairs (s, y) until now; the last HISTORY are kept */
    int        done[MOST_RANKS];          /* portions that each worker has computed; rank 0 counts */
} solver;

static const hpml_allreduce_desc sum_f64 = { .element = HPML_ELEMENT_F64 };

/* Adds loss and gradient of samples [first, first + PORTION) at w to *loss and g. */
static void portion(solver *v, int number, double *loss)
{
    for (int i = number * PORTION; i < (number + 1) * PORTION; i++) {
        double z = 0;
        for (int k = 0; k < FEATURES; k++) z += v->w[feature[i][k]];
        *loss += (log1p(exp(-fabs(z))) + fmax(z, 0) - z * target[i]) / SAMPLES;
        double error = (1 / (1 + exp(-z)) - target[i]) / SAMPLES;
        for (int k = 0; k < FEATURES; k++) v->g[feature[i][k]] += error;
    }
    if (strcmp(hpml_comm_transport(v->c), "clock") == 0) hpml_comm_compute(v->c, PORTION_SECONDS);
}

/* Rank 0 during a pass: one small receive is in flight from each worker; the first worker that asks gets the next
   portion, or -1 when all are handed out. */
static hpml_status coordinate(solver *v)
{
    int32_t       request[MOST_RANKS], next = 0;
    hpml_message  message[MOST_RANKS], *waiting[MOST_RANKS] = { NULL };
    int           working = v->ranks - 1;
    hpml_status   status = HPML_OK;
    for (int r = 1; r < v->ranks && status == HPML_OK; r++) {
        waiting[r] = &message[r];
        status     = hpml_irecv(v->c, r, TAG_REQUEST, &request[r], sizeof request[r], waiting[r]);
    }
    while (working > 0 && status == HPML_OK) {
        int r = hpml_wait_any(v->c, waiting, v->ranks, -1);
        if (r < 0) return hpml_ctx_status(hpml_comm_ctx(v->c));
        int32_t answer = next < PORTIONS ? next++ : -1;
        waiting[r]     = NULL;
        status         = hpml_send(v->c, r, TAG_ANSWER, &answer, sizeof answer);
        if (answer < 0) working--;
        else v->done[r]++;
        if (answer < 0 || status != HPML_OK) continue;
        waiting[r] = &message[r];
        status     = hpml_irecv(v->c, r, TAG_REQUEST, &request[r], sizeof request[r], waiting[r]);
    }
    return status;
}

static hpml_status work(solver *v, double *loss)
{
    for (;;) {
        int32_t     number = 0;
        hpml_status status = hpml_send(v->c, 0, TAG_REQUEST, &number, sizeof number);
        if (status == HPML_OK) status = hpml_recv(v->c, 0, TAG_ANSWER, &number, sizeof number);
        if (status != HPML_OK || number < 0) return status;
        portion(v, number, loss);
    }
}

/* Computes the loss at w, and this rank's block of its gradient. */
static hpml_status evaluate(solver *v, double *loss)
{
    hpml_status status = HPML_OK;
    *loss = 0;
    memset(v->g, 0, sizeof v->g);
    if (v->ranks == 1)
        for (int p = 0; p < PORTIONS; p++) portion(v, p, loss);
    else status = v->rank == 0 ? coordinate(v) : work(v, loss);
    if (v->rank == 0)
        for (int i = 0; i < WEIGHTS; i++) {
            *loss += 0.5 * L2 * v->w[i] * v->w[i];
            v->g[i] += L2 * v->w[i];
        }
    if (status == HPML_OK) status = hpml_reduce_scatter(v->c, v->g, WEIGHTS, HPML_ELEMENT_F64, HPML_SUM);
    if (status == HPML_OK) status = hpml_allreduce(v->c, loss, 1, &sum_f64);
    return status;
}

/* The product of two vectors, of which each rank has a block. */
static double dot(solver *v, const double *a, const double *b)
{
    double sum = 0;
    for (int i = 0; i < v->count; i++) sum += a[i] * b[i];
    hpml_allreduce(v->c, &sum, 1, &sum_f64);
    return sum;
}

/* d <- - H g for the approximation H of the inverse Hessian (two-loop recursion, Nocedal 1980). */
static void direction(solver *v, double *d)
{
    const double *g = v->g + v->begin;
    const int64_t oldest = v->pairs > HISTORY ? v->pairs - HISTORY : 0;
    double        alpha[HISTORY];
    for (int i = 0; i < v->count; i++) d[i] = -g[i];
    for (int64_t k = v->pairs - 1; k >= oldest; k--) {
        const int h = (int)(k % HISTORY);
        alpha[h] = v->inverse[h] * dot(v, v->s[h], d);
        for (int i = 0; i < v->count; i++) d[i] -= alpha[h] * v->y[h][i];
    }
    if (v->pairs > 0) {
        const int    h     = (int)((v->pairs - 1) % HISTORY);
        const double scale = 1 / (v->inverse[h] * dot(v, v->y[h], v->y[h]));
        for (int i = 0; i < v->count; i++) d[i] *= scale;
    }
    for (int64_t k = oldest; k < v->pairs; k++) {
        const int    h    = (int)(k % HISTORY);
        const double beta = v->inverse[h] * dot(v, v->y[h], d);
        for (int i = 0; i < v->count; i++) d[i] += (alpha[h] - beta) * v->s[h][i];
    }
}

/* One step: halves the length until the loss falls enough (Armijo), then keeps s and y. */
static hpml_status step(solver *v, double *loss)
{
    const size_t bytes = sizeof(double) * (size_t)v->count;
    double      *mine = v->w + v->begin, *d = (double *)malloc(3 * bytes);
    double      *old_g = d + v->count, *old_w = old_g + v->count;
    const int    h = (int)(v->pairs % HISTORY);
    hpml_status  status = HPML_OK;
    memcpy(old_g, v->g + v->begin, bytes);
    memcpy(old_w, mine, bytes);
    direction(v, d);
    double descent = dot(v, old_g, d), before = *loss, length = v->pairs == 0 ? 1 / sqrt(-descent) : 1;
    for (; status == HPML_OK; length /= 2) {
        for (int i = 0; i < v->count; i++) mine[i] = old_w[i] + length * d[i];
        status = hpml_allgather(v->c, v->w, WEIGHTS, HPML_ELEMENT_F64);
        if (status == HPML_OK) status = evaluate(v, loss);
        if (*loss <= before + 1e-4 * length * descent || length < 1e-9) break;
    }
    for (int i = 0; i < v->count; i++) {
        v->s[h][i] = mine[i] - old_w[i];
        v->y[h][i] = v->g[v->begin + i] - old_g[i];
    }
    double curvature = dot(v, v->s[h], v->y[h]);
    v->inverse[h] = 1 / curvature;
    v->pairs = curvature > 0 ? v->pairs + 1 : 0; /* else the pairs are given up */
    free(d);
    return status;
}

static hpml_status rank_main(hpml_comm *c, void *user)
{
    job    *j = (job *)user;
    solver *v = (solver *)calloc(1, sizeof *v);
    double  loss, start = hpml_comm_now(c);
    v->c     = c;
    v->rank  = hpml_comm_rank(c);
    v->ranks = hpml_comm_size(c);
    v->begin = (int)hpml_block(WEIGHTS, v->ranks, v->rank);
    v->count = (int)hpml_block(WEIGHTS, v->ranks, v->rank + 1) - v->begin;
    for (int h = 0; h < HISTORY; h++) {
        v->s[h] = (double *)calloc((size_t)v->count, sizeof(double));
        v->y[h] = (double *)calloc((size_t)v->count, sizeof(double));
    }
    hpml_status status = evaluate(v, &loss);
    for (int k = 1; k <= STEPS && status == HPML_OK; k++) {
        status = step(v, &loss);
        if (v->rank == 0 && !j->quiet) printf("  step %2d  loss %.9f\n", k, loss);
    }
    if (v->rank == 0) {
        j->loss    = loss;
        j->seconds = hpml_comm_now(c) - start;
        memcpy(j->w, v->w, sizeof j->w);
        memcpy(j->portions, v->done, sizeof j->portions);
    }
    for (int h = 0; h < HISTORY; h++) free(v->s[h]), free(v->y[h]);
    free(v);
    return status;
}

static double launched(const char *run, const double *slow, job *j)
{
    char             error[512] = "";
    hpml_launch_desc d = { .run = run, .network = { .slow = slow } };
    if (hpml_launch(&d, rank_main, j, error, sizeof error) != HPML_OK) fprintf(stderr, "%s\n", error), exit(1);
    return j->seconds;
}

int main(void)
{
    static job    alone = { .quiet = 1 }, many, fast = { .quiet = 1 }, slowed = { .quiet = 1 };
    static double slow[9] = { 1, 1, 1, 1, 1, 1, 1, 1, 10 };
    int           me = 0, processes = hpml_launched(&me);
    double        apart = 0, norm = 0;
    make_samples();
    launched(processes > 1 ? "mpi" : "threads:5", NULL, &many);
    if (processes > 1) return 0;
    launched("serial", NULL, &alone);
    for (int i = 0; i < WEIGHTS; i++) {
        apart += (many.w[i] - alone.w[i]) * (many.w[i] - alone.w[i]);
        norm += alone.w[i] * alone.w[i];
    }
    printf("one rank alone: loss %.9f; weights differ by %.1e of their norm\n", alone.loss, sqrt(apart / norm));
    double even = launched("clock:9", NULL, &fast), uneven = launched("clock:9", slow, &slowed);
    printf("8 workers, virtual time: %.2f s; one 10 times slower: %.2f s, ideal %.2f s\nportions:", even, uneven,
           even * 8 / 7.1);
    for (int r = 1; r < 9; r++) printf(" %d", slowed.portions[r]);
    printf("\n");
    return sqrt(apart / norm) > 1e-6 || uneven > 1.5 * even * 8 / 7.1;
}
