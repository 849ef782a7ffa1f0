/* Ranks as threads of one process, each with a context whose group of one axis works by shared memory: the simplest
   groups that hpml_ctx_set_group takes. They count their sums. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "../hpml.h"

enum { MAX_RANKS = 8 };
typedef struct seat seat;
typedef hpml_status rank_fn(hpml_ctx *ctx, seat *at, void *user);
typedef struct world {
    int               ranks;
    pthread_barrier_t barrier;
    const float      *shown[MAX_RANKS]; /* each rank's array during a collective operation */
    hpml_axis         axis;
    hpml_ctx_desc     desc;
    rank_fn          *fn;
    void             *user;
    hpml_status       status[MAX_RANKS];
    char              error[MAX_RANKS][300];
} world;
struct seat {
    world *w;
    int    rank, sums, others; /* calls of `sum` and of the other functions */
    bool   fails;              /* the next sum returns an error, on all ranks */
};

static void meet(world *w) { pthread_barrier_wait(&w->barrier); }
static void show(seat *s, const float *x)
{
    s->w->shown[s->rank] = x;
    meet(s->w);
}

/* Combines n floats of all ranks, by rank, in `out`, which may be the array that the ranks show. */
static hpml_status combine(seat *s, const float *x, float *out, int64_t from, int64_t n, bool max)
{
    float *y = (float *)malloc((size_t)(n > 0 ? n : 1) * sizeof *y);
    show(s, x);
    for (int64_t i = 0; i < n; i++) {
        y[i] = s->w->shown[0][from + i];
        for (int r = 1; r < s->w->ranks; r++) {
            float v = s->w->shown[r][from + i];
            y[i] = max ? fmaxf(y[i], v) : y[i] + v;
        }
    }
    meet(s->w);
    memcpy(out, y, (size_t)n * sizeof *y);
    free(y);
    return HPML_OK;
}
static hpml_status group_sum(void *user, float *x, int64_t n)
{
    seat *s = (seat *)user;
    s->sums++;
    combine(s, x, x, 0, n, false);
    return s->fails ? HPML_ERR_PEER : HPML_OK;
}
static hpml_status group_max(void *user, float *x, int64_t n)
{
    ((seat *)user)->others++;
    return combine((seat *)user, x, x, 0, n, true);
}
static hpml_status group_scatter(void *user, const float *all, float *part, int64_t n)
{
    ((seat *)user)->others++;
    return combine((seat *)user, all, part, ((seat *)user)->rank * n, n, false);
}
static hpml_status group_gather(void *user, const float *part, float *all, int64_t n)
{
    seat *s = (seat *)user;
    s->others++;
    show(s, part);
    for (int r = 0; r < s->w->ranks; r++) memcpy(all + r * n, s->w->shown[r], (size_t)n * sizeof *all);
    meet(s->w);
    return HPML_OK;
}
static hpml_status group_swap(void *user, const float *out, float *in, int64_t n)
{
    seat *s = (seat *)user;
    s->others++;
    show(s, out);
    for (int r = 0; r < s->w->ranks; r++) memcpy(in + r * n, s->w->shown[r] + s->rank * n, (size_t)n * sizeof *in);
    meet(s->w);
    return HPML_OK;
}
static hpml_status group_pass(void *user, const float *out, float *in, int64_t n, int shift)
{
    seat *s = (seat *)user;
    int   from = ((s->rank - shift) % s->w->ranks + s->w->ranks) % s->w->ranks;
    s->others++;
    show(s, out);
    memcpy(in, s->w->shown[from], (size_t)n * sizeof *in);
    meet(s->w);
    return HPML_OK;
}
static hpml_status group_bcast(void *user, float *x, int64_t n, int root)
{
    seat *s = (seat *)user;
    s->others++;
    show(s, x);
    if (s->rank != root) memcpy(x, s->w->shown[root], (size_t)n * sizeof *x);
    meet(s->w);
    return HPML_OK;
}

static hpml_group group_of(seat *s)
{
    const hpml_group g = { s->rank, s->w->ranks, s, group_sum, group_max, group_gather, group_scatter, group_swap,
                           group_pass, group_bcast };
    return g;
}

static void *rank_thread(void *arg)
{
    seat      *s = (seat *)arg;
    world     *w = s->w;
    hpml_ctx  *ctx = hpml_ctx_create(&w->desc);
    hpml_group g   = group_of(s);
    if (w->ranks > 1) hpml_ctx_set_group(ctx, w->axis, &g);
    hpml_status status = w->fn(ctx, s, w->user);
    w->status[s->rank] = status != HPML_OK ? status : hpml_ctx_status(ctx);
    snprintf(w->error[s->rank], sizeof w->error[0], "%s", hpml_ctx_error(ctx));
    meet(w); /* a context may be read by other ranks until all are done */
    hpml_ctx_free(ctx);
    return NULL;
}

static int ranks_failed; /* ranks that had an error in the last run_ranks */

/* Runs fn on `ranks` threads with groups of this axis; returns the first rank's status, and its error in `error`. */
static hpml_status run_ranks(int ranks, hpml_axis axis, const hpml_ctx_desc *desc, rank_fn *fn, void *user, char *error)
{
    const hpml_ctx_desc one = { .threads = 1, .seed = 7 };
    world     w = { .ranks = ranks, .axis = axis, .desc = desc ? *desc : one, .fn = fn, .user = user };
    seat      s[MAX_RANKS];
    pthread_t thread[MAX_RANKS];
    pthread_barrier_init(&w.barrier, NULL, (unsigned)ranks);
    for (int r = 0; r < ranks; r++) {
        s[r] = (seat){ .w = &w, .rank = r };
        pthread_create(&thread[r], NULL, rank_thread, &s[r]);
    }
    for (int r = 0; r < ranks; r++) pthread_join(thread[r], NULL);
    pthread_barrier_destroy(&w.barrier);
    hpml_status first = HPML_OK;
    ranks_failed = 0;
    for (int r = ranks - 1; r >= 0; r--)
        if (w.status[r] != HPML_OK) {
            first = w.status[r];
            ranks_failed++;
            if (error) snprintf(error, sizeof w.error[0], "%s", w.error[r]);
        }
    return first;
}
