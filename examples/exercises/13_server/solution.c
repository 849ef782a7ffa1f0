/* Exercise 13: a synchronous parameter server. The task is in README.md; `ninja ex13` builds and checks your copy,
   mine.c. */
#include "check.h"

/* Rank 0. room: memory for p arrays of n floats. */
hpml_status serve(hpml_comm *c, float *w, int64_t n, int rounds, float lr, float *room)
{
    /* >> server */
    const int     workers = hpml_comm_size(c) - 1;
    const size_t  bytes   = (size_t)n * sizeof *w;
    float        *sum     = room;
    hpml_message  message[RANKS_MAX], *list[RANKS_MAX];
    for (int round = 0; round < rounds; round++) {
        memset(sum, 0, bytes);
        for (int k = 0; k < workers; k++) {
            hpml_irecv(c, k + 1, 0, room + (k + 1) * n, bytes, &message[k]);
            list[k] = &message[k];
        }
        for (int k = 0; k < workers; k++) hpml_send(c, k + 1, 0, w, bytes);
        for (int arrived = 0; arrived < workers; arrived++) {
            const int k = hpml_wait_any(c, list, workers, -1);
            if (k < 0) return hpml_ctx_status(hpml_comm_ctx(c));
            list[k] = NULL;
            server_add(c, sum, room + (k + 1) * n, n);
        }
        for (int64_t i = 0; i < n; i++) w[i] -= lr * sum[i] / (float)workers;
    }
    return HPML_OK;
    /* << HPML_TODO("the server: receive all gradients, in the order in which they arrive"); */
}

/* Ranks 1 to p - 1. */
hpml_status work(hpml_comm *c, float *w, float *g, int64_t n, int rounds)
{
    /* >> worker */
    const size_t bytes  = (size_t)n * sizeof *w;
    hpml_status  status = HPML_OK;
    for (int round = 0; round < rounds && status == HPML_OK; round++) {
        status = hpml_recv(c, 0, 0, w, bytes);
        if (status != HPML_OK) return status;
        server_gradient(c, round, w, g, n);
        status = hpml_send(c, 0, 0, g, bytes);
    }
    return status;
    /* << HPML_TODO("a worker: receive weights, compute, send the gradient"); */
}
