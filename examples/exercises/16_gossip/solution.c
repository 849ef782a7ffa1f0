/* Exercise 16: gossip with neighbours. The task is in README.md; `ninja ex16` builds and checks your copy, mine.c. */
#include "check.h"

/* Sets w to the Metropolis weights of g. */
void gossip_weights(const gossip_graph *g, double *w)
{
    /* >> weights */
    int degree[GOSSIP_MAX] = { 0 };
    for (int i = 0; i < g->p; i++)
        for (int j = 0; j < g->p; j++) degree[i] += g->edge[i][j];
    for (int i = 0; i < g->p; i++) {
        double rest = 1;
        for (int j = 0; j < g->p; j++) {
            const int larger = degree[i] > degree[j] ? degree[i] : degree[j];
            w[i * g->p + j] = g->edge[i][j] ? 1.0 / (1 + larger) : 0;
            rest -= w[i * g->p + j];
        }
        w[i * g->p + i] = rest;
    }
    /* << HPML_TODO("weights whose rows and columns add up to 1"); */
}

/* One step: x becomes the weighted mean of this rank's and its neighbours' x. spare: p * n floats. */
hpml_status gossip_step(hpml_comm *c, const gossip_graph *g, const double *w, float *x, int64_t n, float *spare)
{
    /* >> step */
    const int    p = g->p, me = hpml_comm_rank(c);
    const size_t bytes  = (size_t)n * sizeof *x;
    hpml_status  status = HPML_OK;
    hpml_message sent[GOSSIP_MAX], received[GOSSIP_MAX];
    for (int j = 0; j < p; j++)
        if (g->edge[me][j]) hpml_irecv(c, j, 0, spare + j * n, bytes, &received[j]);
    for (int j = 0; j < p; j++)
        if (g->edge[me][j]) hpml_isend(c, j, 0, x, bytes, &sent[j]);
    for (int j = 0; j < p; j++) {
        if (!g->edge[me][j]) continue;
        if (hpml_wait(c, &received[j]) != HPML_OK) status = received[j].status;
        if (hpml_wait(c, &sent[j]) != HPML_OK) status = sent[j].status;
    }
    if (status != HPML_OK) return status;
    for (int64_t i = 0; i < n; i++) {
        double sum = w[me * p + me] * x[i];
        for (int j = 0; j < p; j++)
            if (g->edge[me][j]) sum += w[me * p + j] * spare[j * n + i];
        x[i] = (float)sum;
    }
    return HPML_OK;
    /* << HPML_TODO("one step: messages with all neighbours, then the weighted mean"); */
}

/* Returns the largest |eigenvalue| of w besides the 1 of (1, ..., 1). */
double gossip_lambda(const double *w, int p)
{
    /* >> lambda */
    double v[GOSSIP_MAX], next[GOSSIP_MAX], lambda = 0;
    for (int i = 0; i < p; i++) v[i] = sin(1.0 + 2.3 * i + i * i); /* any vector that no eigenvector is orthogonal to */
    for (int step = 0; step < 4000; step++) {
        double mean = 0, length = 0, norm = 0;
        for (int i = 0; i < p; i++) mean += v[i] / p;
        for (int i = 0; i < p; i++) v[i] -= mean;
        for (int i = 0; i < p; i++) length += v[i] * v[i];
        if (length < 1e-200) return 0;
        for (int i = 0; i < p; i++) {
            next[i] = 0;
            for (int j = 0; j < p; j++) next[i] += w[i * p + j] * v[j] / sqrt(length);
            norm += next[i] * next[i];
        }
        lambda = sqrt(norm); /* two steps with eigenvalues of both signs have the same lengths */
        memcpy(v, next, sizeof v);
    }
    return lambda;
    /* << HPML_TODO("power iteration on vectors whose mean is 0"); */
}
