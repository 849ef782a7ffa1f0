/* Exercise 14: the server of a stale synchronous training. The task is in README.md; `ninja ex14` builds and checks
   your copy, mine.c. */
#include "check.h"

/* Rank 0. room: memory for p arrays of n floats. */
hpml_status serve(hpml_comm *c, float *w, int64_t n, int steps, int bound, float lr, float *room)
{
    /* >> server */
    const int    workers = hpml_comm_size(c) - 1;
    const size_t bytes   = (size_t)n * sizeof *w;
    int          finished[RANKS_MAX] = { 0 }, ready = 0; /* steps of each worker; workers that have finished all */
    bool         waits[RANKS_MAX]    = { false };
    hpml_message message[RANKS_MAX], *list[RANKS_MAX];
    for (int k = 0; k < workers; k++) {
        hpml_irecv(c, k + 1, 0, room + k * n, bytes, &message[k]);
        list[k] = &message[k];
        hpml_send(c, k + 1, 0, w, bytes);
    }
    while (ready < workers) {
        const int k = hpml_wait_any(c, list, workers, -1);
        if (k < 0) return hpml_ctx_status(hpml_comm_ctx(c));
        for (int64_t i = 0; i < n; i++) w[i] -= lr * room[k * n + i];
        finished[k]++;
        waits[k] = finished[k] < steps;
        if (waits[k]) hpml_irecv(c, k + 1, 0, room + k * n, bytes, &message[k]);
        else {
            list[k] = NULL;
            ready++;
        }
        int slowest = steps;
        for (int j = 0; j < workers; j++)
            if (finished[j] < slowest) slowest = finished[j];
        for (int j = 0; j < workers; j++) {
            if (!waits[j] || finished[j] - slowest > bound) continue;
            hpml_send(c, j + 1, 0, w, bytes);
            waits[j] = false;
        }
    }
    return HPML_OK;
    /* << HPML_TODO("the server: gradients as they come, weights to all workers that may go on"); */
}
