/* Bulk-synchronous supersteps (Valiant 1990) for programs that think like a vertex, as Pregel's (Malewicz et al. 2010).
   Include hpml_comm.h before. Ranks own blocks of the vertices. In a superstep
     1. each vertex that is active, or has mail, reads that mail of the superstep before, changes its value, sends mail
        to other vertices, and stays active or votes to halt;
     2. mail for one vertex is combined to one number before it leaves a rank, and travels to the rank that owns the
        vertex;
     3. all ranks add up their sums, which vertices may read in the next superstep. This allreduce is the barrier: it
        ends on no rank before all ranks have come to it.
   The run ends when no vertex is active and none has mail. */
#ifndef SUPERSTEPS_H
#define SUPERSTEPS_H

#include <stdbool.h>
#include <string.h>

enum { BSP_SUMS = 4, BSP_RANKS = 64, BSP_TAG = 1, BSP_MOST = 1000 }; /* BSP_MOST: supersteps of a run */

typedef struct bsp_mail { int64_t to; double x; } bsp_mail;

typedef struct bsp {
    hpml_comm *c;
    int        vertices, first, end; /* all; this rank's are first to end - 1 */
    int        superstep;            /* from 0 on */
    double    *value;                /* (vertices) valid from first to end - 1 */
    double   (*combine)(double x, double y);
    double     sum[BSP_SUMS];        /* vertices of this rank add to them in this superstep */
    double     last[BSP_SUMS];       /* sums of all vertices in the superstep before */
    int64_t    sent, combined;       /* mail of this rank's vertices; what of it has left this rank */
    double    *out, *in;             /* (vertices) combined mail of this rank's vertices; mail of the last superstep */
    bool      *has_out, *has_in, *active;
    bsp_mail  *packed;             /* (2, vertices) what is sent, what is received */
} bsp;

/* Returns whether vertex v stays active. mail: what `combine` has made of the mail; has_mail false: none. */
typedef bool bsp_compute(bsp *b, int v, bool has_mail, double mail, void *user);

static bsp *bsp_create(hpml_comm *c, int vertices, double (*combine)(double x, double y))
{
    hpml_ctx    *ctx   = hpml_comm_ctx(c);
    const size_t n     = (size_t)vertices;
    const int    ranks = hpml_comm_size(c);
    if (ranks > BSP_RANKS) {
        hpml_ctx_fail(ctx, HPML_ERR_ARGUMENT, "%d ranks: supersteps.h is for up to %d", ranks, BSP_RANKS);
        return NULL;
    }
    bsp *b = (bsp *)hpml_ctx_alloc(ctx, sizeof *b, NULL);
    if (!b) return NULL;
    b->c        = c;
    b->vertices = vertices;
    b->combine  = combine;
    b->first    = (int)hpml_block(vertices, ranks, hpml_comm_rank(c));
    b->end      = (int)hpml_block(vertices, ranks, hpml_comm_rank(c) + 1);
    b->value    = (double *)hpml_ctx_alloc(ctx, n * sizeof *b->value, NULL);
    b->out      = (double *)hpml_ctx_alloc(ctx, n * sizeof *b->out, NULL);
    b->in       = (double *)hpml_ctx_alloc(ctx, n * sizeof *b->in, NULL);
    b->has_out  = (bool *)hpml_ctx_alloc(ctx, n, NULL);
    b->has_in   = (bool *)hpml_ctx_alloc(ctx, n, NULL);
    b->active   = (bool *)hpml_ctx_alloc(ctx, n, NULL);
    b->packed  = (bsp_mail *)hpml_ctx_alloc(ctx, 2 * n * sizeof *b->packed, NULL);
    return hpml_ctx_status(ctx) == HPML_OK ? b : NULL;
}

/* A vertex sends x to vertex `to`, where the next superstep reads it. */
static void bsp_send(bsp *b, int to, double x)
{
    b->out[to]     = b->has_out[to] ? b->combine(b->out[to], x) : x;
    b->has_out[to] = true;
    b->sent++;
}

static void bsp_get(bsp *b, int64_t to, double x)
{
    b->in[to]     = b->has_in[to] ? b->combine(b->in[to], x) : x;
    b->has_in[to] = true;
}

/* Brings the mail to the ranks that own its vertices. Mail of one vertex is combined in a fixed order of ranks. */
static hpml_status bsp_exchange(bsp *b)
{
    const int   ranks = hpml_comm_size(b->c), rank = hpml_comm_rank(b->c);
    int64_t     sent[BSP_RANKS] = { 0 }, received[BSP_RANKS] = { 0 };
    bsp_mail   *arrived = b->packed + b->vertices;
    hpml_status status;
    for (int r = 0; r < ranks; r++) {
        const int64_t end = hpml_block(b->vertices, ranks, r + 1);
        for (int64_t v = hpml_block(b->vertices, ranks, r); v < end; v++) sent[r] += b->has_out[v];
    }
    status = hpml_all_to_all(b->c, sent, received, sizeof sent[0]);
    for (int k = 0; k < ranks && status == HPML_OK; k++) {
        const int     to = (rank + k) % ranks, from = (rank - k + ranks) % ranks;
        const int64_t end = hpml_block(b->vertices, ranks, to + 1);
        int64_t       n = 0;
        for (int64_t v = hpml_block(b->vertices, ranks, to); v < end; v++) {
            if (!b->has_out[v]) continue;
            b->packed[n].to  = v;
            b->packed[n++].x = b->out[v];
        }
        if (k == 0) {
            memcpy(arrived, b->packed, (size_t)n * sizeof *arrived);
        } else {
            status = hpml_sendrecv(b->c, to, b->packed, (size_t)n * sizeof *arrived, from, arrived,
                                   (size_t)received[from] * sizeof *arrived, BSP_TAG);
            b->combined += n;
        }
        for (int64_t i = 0; i < received[from] && status == HPML_OK; i++) bsp_get(b, arrived[i].to, arrived[i].x);
    }
    memset(b->has_out, 0, (size_t)b->vertices);
    return status;
}

/* Runs supersteps until all vertices have voted to halt and no mail is left. Collective. */
static hpml_status bsp_run(bsp *b, bsp_compute *compute, void *user)
{
    static const hpml_allreduce_desc f64 = { .element = HPML_ELEMENT_F64 };
    if (!b) return HPML_ERR_ARGUMENT;
    double sum[BSP_SUMS + 1] = { 1 }; /* active vertices and mail, then the program's sums */
    for (int v = b->first; v < b->end; v++) b->active[v] = true;
    for (b->superstep = 0; sum[0] > 0; b->superstep++) {
        if (b->superstep == BSP_MOST)
            return hpml_ctx_fail(hpml_comm_ctx(b->c), HPML_ERR_STATE, "vertices active after %d supersteps", BSP_MOST);
        memset(b->sum, 0, sizeof b->sum);
        for (int v = b->first; v < b->end; v++) {
            if (!b->active[v] && !b->has_in[v]) continue;
            b->active[v] = compute(b, v, b->has_in[v], b->in[v], user);
        }
        memset(b->has_in, 0, (size_t)b->vertices);
        if (bsp_exchange(b) != HPML_OK) return hpml_ctx_status(hpml_comm_ctx(b->c));
        sum[0] = 0;
        for (int v = b->first; v < b->end; v++) sum[0] += b->active[v] || b->has_in[v];
        memcpy(sum + 1, b->sum, sizeof b->sum);
        if (hpml_allreduce(b->c, sum, BSP_SUMS + 1, &f64) != HPML_OK) return hpml_ctx_status(hpml_comm_ctx(b->c));
        memcpy(b->last, sum + 1, sizeof b->last);
    }
    return HPML_OK;
}

#endif
