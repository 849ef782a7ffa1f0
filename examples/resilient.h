/* Data in the memory of workers that survive the loss of a worker, as Spark's resilient datasets (Zaharia et al. 2012):
   a shard is a function of numbers (its lineage), so another worker makes a lost shard again, with the same bits.
   Include hpml_comm.h before; launch with .survive. Rank 0 is the driver: resilient_create, resilient_sum for each step
   of a training, resilient_end. The other ranks call resilient_work. Sums are formed in the order of the shards, so
   they do not depend on which worker has computed a shard. With one rank the driver does all the work. */
#ifndef RESILIENT_H
#define RESILIENT_H

#include <stdbool.h>
#include <string.h>

enum { RESILIENT_SHARDS = 64, RESILIENT_RANKS = 64 };
enum { RESILIENT_TAG_REQUEST = 1, RESILIENT_TAG_INPUT, RESILIENT_TAG_ANSWER };

/* All ranks fill in the same. */
typedef struct resilient_desc {
    int    shards;   /* 1 to RESILIENT_SHARDS */
    size_t bytes;    /* of one shard in memory */
    int    in, out;  /* doubles: that a computation gets, for example weights; that it gives for each shard */
    void (*make)(int epoch, int number, void *shard);
    void (*compute)(const void *shard, const double *in, double *out);
} resilient_desc;

typedef struct resilient_request {
    int32_t epoch, count, shard[RESILIENT_SHARDS]; /* count 0: the end */
} resilient_request;

/* ---- a worker ---- */

/* Makes shards where they are missing, computes, answers with the number of shards made and the results, until the
   driver ends. fails: the number of a request, from 1 on, in the middle of which this worker fails; 0: never. */
static hpml_status resilient_work(hpml_comm *c, const resilient_desc *d, int fails)
{
    hpml_ctx         *ctx     = hpml_comm_ctx(c);
    const size_t      doubles = 1 + (size_t)d->shards * (size_t)d->out;
    char             *data    = (char *)hpml_ctx_alloc(ctx, d->bytes * (size_t)d->shards, NULL);
    double           *in      = (double *)hpml_ctx_alloc(ctx, sizeof(double) * (size_t)d->in, NULL);
    double           *answer  = (double *)hpml_ctx_alloc(ctx, sizeof(double) * doubles, NULL);
    int               epoch[RESILIENT_SHARDS]; /* to which the shard in memory belongs; -1: none */
    resilient_request q;
    for (int s = 0; s < d->shards; s++) epoch[s] = -1;
    for (int request = 1; hpml_ctx_status(ctx) == HPML_OK; request++) {
        if (hpml_recv(c, 0, RESILIENT_TAG_REQUEST, &q, sizeof q) != HPML_OK || q.count == 0) break;
        hpml_recv(c, 0, RESILIENT_TAG_INPUT, in, sizeof(double) * (size_t)d->in);
        answer[0] = 0;
        for (int i = 0; i < q.count; i++) {
            const int s     = q.shard[i];
            char     *shard = data + d->bytes * (size_t)s;
            if (request == fails && i == q.count / 2)
                return hpml_ctx_fail(ctx, HPML_ERR_STATE, "worker %d fails in request %d, as it was asked to",
                                     hpml_comm_rank(c), request);
            if (epoch[s] != q.epoch) {
                d->make(q.epoch, s, shard);
                epoch[s] = q.epoch;
                answer[0]++;
            }
            d->compute(shard, in, answer + 1 + i * d->out);
        }
        hpml_send(c, 0, RESILIENT_TAG_ANSWER, answer, sizeof(double) * (size_t)(1 + q.count * d->out));
    }
    return hpml_ctx_status(ctx);
}

/* ---- the driver ---- */

typedef struct resilient {
    hpml_comm           *c;
    const resilient_desc *d;
    int                  workers, lost;
    int                  owner[RESILIENT_SHARDS]; /* the worker that has the shard; 0: no worker is left */
    bool                 done[RESILIENT_SHARDS];  /* in this step */
    int64_t              made, moved;             /* shards that workers have made; that have changed their owner */
    bool                 is_lost[RESILIENT_RANKS];
    resilient_request    asked[RESILIENT_RANKS];
    hpml_message         message[RESILIENT_RANKS], *waiting[RESILIENT_RANKS]; /* the receive of an answer */
    double              *answer; /* (ranks, 1 + shards * out) */
    double              *result; /* (shards, out) */
} resilient;

static size_t resilient_row(const resilient *v) { return 1 + (size_t)v->d->shards * (size_t)v->d->out; }

static resilient *resilient_create(hpml_comm *c, const resilient_desc *d)
{
    hpml_ctx  *ctx = hpml_comm_ctx(c);
    resilient *v   = (resilient *)hpml_ctx_alloc(ctx, sizeof *v, NULL);
    if (!v) return NULL;
    v->c       = c;
    v->d       = d;
    v->workers = hpml_comm_size(c) - 1;
    v->answer  = (double *)hpml_ctx_alloc(ctx, sizeof(double) * resilient_row(v) * (size_t)(v->workers + 1), NULL);
    v->result  = (double *)hpml_ctx_alloc(ctx, sizeof(double) * resilient_row(v), NULL);
    if (d->shards > RESILIENT_SHARDS || v->workers >= RESILIENT_RANKS)
        hpml_ctx_fail(ctx, HPML_ERR_ARGUMENT, "%d shards on %d ranks: 64 of both at most", d->shards, v->workers + 1);
    for (int s = 0; s < d->shards && v->workers > 0; s++) v->owner[s] = 1 + s % v->workers;
    return hpml_ctx_status(ctx) == HPML_OK ? v : NULL;
}

/* Asks worker r for its shards that are not done; false: there are none. */
static bool resilient_ask(resilient *v, int r, int epoch, const double *in)
{
    resilient_request *q = &v->asked[r];
    q->epoch = epoch;
    q->count = 0;
    for (int s = 0; s < v->d->shards; s++)
        if (v->owner[s] == r && !v->done[s]) q->shard[q->count++] = s;
    if (q->count == 0) return false;
    v->waiting[r] = &v->message[r];
    hpml_irecv(v->c, r, RESILIENT_TAG_ANSWER, v->answer + (size_t)r * resilient_row(v),
               sizeof(double) * (size_t)(1 + q->count * v->d->out), v->waiting[r]);
    hpml_send(v->c, r, RESILIENT_TAG_REQUEST, q, sizeof *q); /* to a lost worker: the receive ends with an error */
    hpml_send(v->c, r, RESILIENT_TAG_INPUT, in, sizeof(double) * (size_t)v->d->in);
    return true;
}

/* The shards of worker r, which is lost, go to the others in turn. */
static void resilient_lose(resilient *v, int r)
{
    int next = r;
    v->is_lost[r] = true;
    v->lost++;
    for (int s = 0; s < v->d->shards; s++) {
        if (v->owner[s] != r) continue;
        for (int k = 0; k < v->workers && (v->is_lost[next] || k == 0); k++) next = 1 + next % v->workers;
        v->owner[s] = v->is_lost[next] ? 0 : next;
        v->moved++;
    }
}

static void resilient_take(resilient *v, int r)
{
    const resilient_request *q      = &v->asked[r];
    const double            *answer = v->answer + (size_t)r * resilient_row(v);
    v->made += (int64_t)answer[0];
    for (int i = 0; i < q->count; i++) {
        const int s = q->shard[i];
        memcpy(v->result + s * v->d->out, answer + 1 + i * v->d->out, sizeof(double) * (size_t)v->d->out);
        v->done[s] = true;
    }
}

/* sum <- over all shards of epoch `epoch`, of what `compute` gives for `in`. Fails when no worker is left. */
static hpml_status resilient_sum(resilient *v, int epoch, const double *in, double *sum)
{
    const resilient_desc *d   = v->d;
    hpml_ctx             *ctx = hpml_comm_ctx(v->c);
    void *alone = v->workers == 0 ? hpml_ctx_alloc(ctx, d->bytes, NULL) : NULL;
    for (int s = 0; s < d->shards; s++) {
        v->done[s] = alone != NULL;
        if (alone) d->make(epoch, s, alone);
        if (alone) d->compute(alone, in, v->result + s * d->out);
    }
    hpml_ctx_release(ctx, alone);
    while (v->workers > 0) {
        int busy = 0;
        for (int r = 1; r <= v->workers; r++)
            busy += v->waiting[r] != NULL || (!v->is_lost[r] && resilient_ask(v, r, epoch, in));
        if (busy == 0) break;
        const int r = hpml_wait_any(v->c, v->waiting, v->workers + 1, -1);
        if (r < 0) return hpml_ctx_status(ctx);
        v->waiting[r] = NULL;
        if (v->message[r].status == HPML_OK) resilient_take(v, r);
        else resilient_lose(v, r);
    }
    memset(sum, 0, sizeof(double) * (size_t)d->out);
    for (int s = 0; s < d->shards; s++) {
        if (!v->done[s]) return hpml_ctx_fail(ctx, HPML_ERR_STATE, "shard %d: all %d workers are lost", s, v->workers);
        for (int k = 0; k < d->out; k++) sum[k] += v->result[s * d->out + k];
    }
    return HPML_OK;
}

static void resilient_end(resilient *v)
{
    const resilient_request end = { 0 };
    for (int r = 1; r <= v->workers; r++)
        if (!v->is_lost[r]) hpml_send(v->c, r, RESILIENT_TAG_REQUEST, &end, sizeof end);
    hpml_ctx_release(hpml_comm_ctx(v->c), v->answer);
    hpml_ctx_release(hpml_comm_ctx(v->c), v->result);
    hpml_ctx_release(hpml_comm_ctx(v->c), v);
}

#endif
