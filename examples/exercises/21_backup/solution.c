/* Exercise 21: backup workers. The task is in README.md; `ninja ex21` builds and checks your copy, mine.c. */
#include "check.h"

/* Returns for how many gradients to wait, so that the most are used per second. seconds: (rounds, workers). */
int backup_choose(const double *seconds, int rounds, int workers)
{
    /* >> choose */
    double total[BACKUP_MAX] = { 0 }; /* of all rounds, until the m-th gradient has come */
    int    best = 0;
    for (int r = 0; r < rounds; r++)
        for (int k = 0; k < workers; k++) {
            int earlier = 0; /* workers that were ready before worker k; at the same time: those with lower numbers */
            for (int j = 0; j < workers; j++) {
                const double a = seconds[r * workers + j], b = seconds[r * workers + k];
                earlier += a < b || (a == b && j < k);
            }
            total[earlier] += seconds[r * workers + k];
        }
    for (int m = 1; m < workers; m++)
        if ((m + 1) / total[m] > (best + 1) / total[best]) best = m;
    return best + 1;
    /* << HPML_TODO("the number of gradients to wait for"); */
}

/* Rank 0. room: memory for p + 2 arrays of n + 1 floats. */
hpml_status serve(hpml_comm *c, float *w, int64_t n, int rounds, int wait_for, float lr, float *room)
{
    /* >> server */
    const int    workers = hpml_comm_size(c) - 1;
    const size_t bytes   = (size_t)(n + 1) * sizeof *w;
    float       *out = room + workers * (n + 1), *sum = out + n + 1;
    int          got[RANKS_MAX] = { 0 }, counted = wait_for, round = -1;
    hpml_message message[RANKS_MAX], *list[RANKS_MAX];
    for (int k = 0; k < workers; k++) {
        hpml_irecv(c, k + 1, 0, room + k * (n + 1), bytes, &message[k]);
        list[k] = &message[k];
    }
    for (int received = 0; received < workers * rounds; received++) {
        if (counted == wait_for && round < rounds - 1) { /* the next round begins */
            counted = 0;
            out[0]  = (float)++round;
            memcpy(out + 1, w, (size_t)n * sizeof *w);
            memset(sum, 0, (size_t)n * sizeof *w);
            for (int k = 0; k < workers; k++) hpml_send(c, k + 1, 0, out, bytes);
        }
        const int k = hpml_wait_any(c, list, workers, -1);
        if (k < 0) return hpml_ctx_status(hpml_comm_ctx(c));
        const float *g = room + k * (n + 1);
        if ((int)g[0] == round && counted < wait_for) {
            for (int64_t i = 0; i < n; i++) sum[i] += g[i + 1];
            if (++counted == wait_for)
                for (int64_t i = 0; i < n; i++) w[i] -= lr * sum[i] / (float)wait_for;
        }
        if (++got[k] < rounds) hpml_irecv(c, k + 1, 0, room + k * (n + 1), bytes, &message[k]);
        else list[k] = NULL;
    }
    return HPML_OK;
    /* << HPML_TODO("a server that waits for the first gradients of each round"); */
}
