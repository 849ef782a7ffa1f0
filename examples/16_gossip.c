/* What you learn: how fast ranks agree that only talk to neighbours, and why. Difficulty 2 of 4.
   cc -O2 examples/16_gossip.c -o gossip -lm -lpthread && ./gossip          (or ./gossip RANKS, 3 to 32)
   Each rank has some random numbers. In every step it takes a weighted mean with its neighbours (hpml_mix). The spread,
   the distance of all ranks' numbers to their mean, shrinks in each step by the second largest |eigenvalue| of the
   matrix of the weights; for random pairs, whose matrix changes, by the root of that of the mean matrix.
   prints for each topology:   ring of 8: spread times 0.805 a step, second eigenvalue 0.805   and a bar for each step.
   The strategy HPML_STRATEGY_GOSSIP trains this way: mix the parameters, then apply your own gradient. */
#define HPML_IMPLEMENTATION
#include "../hpml_comm.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { MOST = 32, NUMBERS = 200, STEPS = 16, PAIRINGS = 1000, FRESH = 400 };

typedef struct trial {
    hpml_topology topology;
    double        spread[STEPS + 1]; /* after so many steps, as a fraction of the spread at first */
    double        rate;              /* by which a step multiplies the spread */
} trial;

/* Returns the root of the sum of squared differences to the mean over ranks. all: (p, NUMBERS) memory. */
static double spread_of(hpml_comm *c, const float *x, float *all)
{
    int    p = hpml_comm_size(c);
    double sum = 0;
    for (int k = 0; k < NUMBERS; k++) all[hpml_comm_rank(c) * NUMBERS + k] = x[k];
    hpml_allgather(c, all, (int64_t)p * NUMBERS, HPML_ELEMENT_F32);
    for (int k = 0; k < NUMBERS; k++) {
        double mean = 0;
        for (int r = 0; r < p; r++) mean += (double)all[r * NUMBERS + k] / p;
        for (int r = 0; r < p; r++) sum += pow((double)all[r * NUMBERS + k] - mean, 2);
    }
    return sqrt(sum);
}

static hpml_status mix(hpml_comm *c, void *user)
{
    trial   *t = (trial *)user;
    int      rank = hpml_comm_rank(c), p = hpml_comm_size(c);
    hpml_rng rng = { .seed = 1, .stream = (uint64_t)rank };
    float    x[NUMBERS], *all = (float *)malloc(sizeof(float) * NUMBERS * (size_t)p);
    double   first = 1, squares = 0;
    if (!all) return HPML_ERR_MEMORY;
    hpml_rng_fill_normal(&rng, x, NUMBERS);
    for (int step = 0; step <= STEPS; step++) {
        double spread = spread_of(c, x, all);
        if (step == 0) first = spread;
        if (rank == 0) t->spread[step] = spread / first;
        hpml_mix(c, x, NUMBERS, t->topology, 7, step);
    }
    for (int step = 0; step < FRESH; step++) { /* new numbers in each step: what a random matrix does on average */
        hpml_rng_fill_normal(&rng, x, NUMBERS);
        double before = spread_of(c, x, all);
        hpml_mix(c, x, NUMBERS, t->topology, 7, step);
        squares += pow(spread_of(c, x, all) / before, 2) / FRESH;
    }
    free(all);
    if (rank != 0) return HPML_OK;
    int last = STEPS; /* before rounding is what is left of the spread */
    while (last > 0 && t->spread[last] < 1e-5) last--;
    t->rate = last > 1 ? pow(t->spread[last] / t->spread[last / 2], 1.0 / (last - last / 2)) : t->spread[1];
    if (t->topology == HPML_TOPOLOGY_PAIRS) t->rate = sqrt(squares);
    return hpml_ctx_status(hpml_comm_ctx(c));
}

/* Second largest |eigenvalue| of a symmetric matrix w whose rows add up to 1, by power iteration without the mean. */
static double second_eigenvalue(const double *w, int p)
{
    double v[MOST], next[MOST], size = 0;
    for (int i = 0; i < p; i++) v[i] = sin(1 + 3 * i);
    for (int turn = 0; turn < 5000; turn++) {
        double mean = 0, square = 0;
        for (int i = 0; i < p; i++) mean += v[i] / p;
        for (int i = 0; i < p; i++) v[i] -= mean;
        for (int i = 0; i < p; i++) {
            next[i] = 0;
            for (int j = 0; j < p; j++) next[i] += w[i * p + j] * v[j];
            square += next[i] * next[i];
        }
        size = sqrt(square);
        if (size < 1e-12) return 0;
        for (int i = 0; i < p; i++) v[i] = next[i] / size;
    }
    return size;
}

/* By how much the matrix of a step shrinks the spread. The mean matrix of random pairs, for which W = W^T W, has the
   eigenvalues 1 and, p - 1 times, another one: the sum of them all is the trace. */
static double expected(hpml_topology topology, int p)
{
    static double w[MOST * MOST];
    double        trace = 0;
    hpml_mixing_matrix(topology, p, 7, 0, w);
    if (topology != HPML_TOPOLOGY_PAIRS) return second_eigenvalue(w, p);
    for (int step = 0; step < PAIRINGS; step++) {
        hpml_mixing_matrix(topology, p, 7, step, w);
        for (int i = 0; i < p; i++) trace += w[i * p + i] / PAIRINGS;
    }
    return sqrt((trace - 1) / (p - 1));
}

/* Draws the spread after each step: 60 columns are 1, each 12 fewer are a tenth. */
static void draw(const trial *t)
{
    for (int step = 0; step <= STEPS; step++) {
        double tenths = t->spread[step] > 0 ? log10(t->spread[step]) : -5;
        int    columns = (int)(60.5 + 12 * tenths);
        printf("  %2d |", step);
        for (int i = 0; i < columns; i++) putchar('#');
        printf(" %.2g\n", t->spread[step]);
        if (columns < 1) break;
    }
}

int main(int argc, char **argv)
{
    static const char *const names[] = { "ring", "wheel", "pairs", "all" };
    int ranks = argc > 1 ? atoi(argv[1]) : 8;
    if (ranks < 3 || ranks > MOST) {
        fprintf(stderr, "RANKS is %s; 3 to %d are possible\n", argv[1], MOST);
        return 1;
    }
    for (int k = 0; k <= HPML_TOPOLOGY_ALL; k++) {
        trial            t = { .topology = (hpml_topology)k };
        hpml_launch_desc d = { .ranks = ranks, .ctx = { .threads = 1, .log = hpml_log_stderr } };
        if (hpml_launch(&d, mix, &t, NULL, 0) != HPML_OK) return 1;
        printf("%s of %d: spread times %.3f a step, second eigenvalue %.3f\n", names[k], ranks, t.rate,
               expected(t.topology, ranks));
        draw(&t);
    }
    return 0;
}
