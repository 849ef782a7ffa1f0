/* What you learn: programs that think like a vertex: supersteps between barriers, and which locks a graph in shared
   memory needs. Difficulty 3 of 4.
   cc -O2 examples/34_supersteps.c -o supersteps -lm -lpthread && ./supersteps          (or ./supersteps VERTICES)
   mpicc -O2 -DHPML_USE_MPI examples/34_supersteps.c -o steps -lm -lpthread && HPML_RUN=mpi mpiexec -n 4 ./steps
   Pregel (Malewicz et al. 2010; examples/supersteps.h): vertices compute in supersteps, send each other mail, vote to
   halt. Two programs: PageRank on 1,000 vertices; and, for each vertex, the largest number of all vertices from which
   a path leads to it.
   GraphLab (Low et al. 2010): threads update vertices of a graph that they share. An update adds 1 to its vertex, to
   its edges and to its neighbours; the level of consistency says what is locked meanwhile:
     none    nothing, as in Hogwild (Niu et al. 2011)        edge    the vertex; neighbours against their own updates
     vertex  the vertex                                      full    the vertex and its neighbours
   An update is lost where two threads read the same number and one overwrites what the other has written.
   prints   PageRank: 137 supersteps; ...   and, for each level, lost updates. Exit 1 with a sentence if a value is not
   that of a serial loop, or an update is lost that the level protects. HPML_RUN=clock:3 chooses the ranks of Pregel. */
#define HPML_IMPLEMENTATION
#include "../hpml_comm.h"
#include "supersteps.h"
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

enum { LINKS = 12 };
static const double DAMPING = 0.85, SMALL = 1e-12;

/* Vertex v links to to[v * LINKS] ... to[v * LINKS + links[v] - 1]; every tenth vertex has no links. */
typedef struct graph { int vertices, *links, *to; } graph;

static void draw_graph(graph *g, int vertices)
{
    g->vertices = vertices;
    g->links    = (int *)calloc((size_t)vertices, sizeof(int));
    g->to       = (int *)calloc((size_t)vertices * LINKS, sizeof(int));
    if (!g->links || !g->to) fprintf(stderr, "no memory for %d vertices\n", vertices), exit(1);
    for (int v = 0; v < vertices; v++) {
        hpml_rng rng = { .seed = 3, .stream = (uint64_t)v };
        g->links[v] = v % 10 == 9 ? 0 : 1 + (int)hpml_rng_below(&rng, LINKS);
        for (int k = 0; k < g->links[v]; k++) {
            const double u = (double)hpml_rng_uniform(&rng);
            g->to[v * LINKS + k] = (int)(u * u * vertices); /* low numbers are popular */
        }
    }
}

/* ---- Pregel: PageRank ---- */

enum { CHANGE, UNLINKED }; /* sums of a superstep: |changes|; the PageRank of vertices without links, shared by all */

static double add(double x, double y) { return x + y; }

static bool page_rank(bsp *b, int v, bool has_mail, double mail, void *user)
{
    const graph *g = (const graph *)user;
    const double n = g->vertices, old = b->value[v];
    b->value[v] = (1 - DAMPING) / n + DAMPING * ((has_mail ? mail : 0) + b->last[UNLINKED] / n);
    if (b->superstep == 0) b->value[v] = 1 / n;
    b->sum[CHANGE] += fabs(b->value[v] - old);
    if (g->links[v] == 0) b->sum[UNLINKED] += b->value[v];
    if (b->superstep > 0 && b->last[CHANGE] < SMALL) return false;
    for (int k = 0; k < g->links[v]; k++) bsp_send(b, g->to[v * LINKS + k], b->value[v] / g->links[v]);
    return true;
}

/* The same by loops over all vertices; as many rounds. */
static void serial_rank(const graph *g, int rounds, double *p)
{
    const double n = g->vertices;
    double      *next = (double *)malloc(sizeof *next * (size_t)g->vertices);
    if (!next) fprintf(stderr, "no memory\n"), exit(1);
    for (int v = 0; v < g->vertices; v++) p[v] = 1 / n;
    for (int round = 1; round < rounds; round++) {
        double unlinked = 0;
        for (int v = 0; v < g->vertices; v++) {
            next[v] = 0;
            if (g->links[v] == 0) unlinked += p[v];
        }
        for (int v = 0; v < g->vertices; v++)
            for (int k = 0; k < g->links[v]; k++) next[g->to[v * LINKS + k]] += p[v] / g->links[v];
        for (int v = 0; v < g->vertices; v++) p[v] = (1 - DAMPING) / n + DAMPING * (next[v] + unlinked / n);
    }
    free(next);
}

/* ---- Pregel: the largest number upstream ---- */

static double number_of(int v) { return v % 100 * 7919 % 101 + v; }

/* A vertex is awake only after its number has grown. */
static bool largest(bsp *b, int v, bool has_mail, double mail, void *user)
{
    const graph *g   = (const graph *)user;
    const double old = b->value[v];
    b->value[v] = b->superstep == 0 ? number_of(v) : old;
    if (has_mail) b->value[v] = fmax(b->value[v], mail);
    if (b->superstep > 0 && b->value[v] == old) return false;
    for (int k = 0; k < g->links[v]; k++) bsp_send(b, g->to[v * LINKS + k], b->value[v]);
    return false;
}

static void serial_largest(const graph *g, double *x)
{
    bool changed = true;
    for (int v = 0; v < g->vertices; v++) x[v] = number_of(v);
    while (changed) {
        changed = false;
        for (int v = 0; v < g->vertices; v++)
            for (int k = 0; k < g->links[v]; k++) {
                double *to = &x[g->to[v * LINKS + k]];
                changed = changed || x[v] > *to;
                *to     = fmax(*to, x[v]);
            }
    }
}

static hpml_status run_program(hpml_comm *c, graph *g, bool ranking)
{
    static const hpml_allreduce_desc most = { .element = HPML_ELEMENT_F64, .reduce = HPML_MAX };
    static const hpml_allreduce_desc sum  = { .element = HPML_ELEMENT_I64 };
    bsp    *b        = bsp_create(c, g->vertices, ranking ? add : fmax);
    double *expected = (double *)hpml_ctx_alloc(hpml_comm_ctx(c), sizeof(double) * (size_t)g->vertices, NULL);
    if (!expected || bsp_run(b, ranking ? page_rank : largest, g) != HPML_OK) return hpml_ctx_status(hpml_comm_ctx(c));
    if (ranking) serial_rank(g, b->superstep, expected);
    else serial_largest(g, expected);
    double  apart   = 0;
    int64_t mail[2] = { b->sent, b->combined };
    for (int v = b->first; v < b->end; v++) apart = fmax(apart, fabs(b->value[v] - expected[v]));
    hpml_allreduce(c, &apart, 1, &most);
    hpml_allreduce(c, mail, 2, &sum);
    if (hpml_comm_rank(c) == 0)
        printf("  %s: %d supersteps; mail %lld, to other ranks %lld; %.1e off\n", ranking ? "PageRank" : "largest",
               b->superstep, (long long)mail[0], (long long)mail[1], apart);
    if (apart <= (ranking ? 1e-9 : 0)) return hpml_ctx_status(hpml_comm_ctx(c));
    return hpml_ctx_fail(hpml_comm_ctx(c), HPML_ERR_STATE, "values are %g off those of a serial loop", apart);
}

static hpml_status pregel(hpml_comm *c, void *user)
{
    if (hpml_comm_rank(c) == 0) printf("ranks: %d (%s)\n", hpml_comm_size(c), hpml_comm_transport(c));
    const hpml_status status = run_program(c, (graph *)user, true);
    return status == HPML_OK ? run_program(c, (graph *)user, false) : status;
}

/* ---- GraphLab: levels of consistency ---- */

enum { THREADS = 4, SHARED = 24, UPDATES = 3000, ALL = THREADS * UPDATES };
typedef enum level { NONE, VERTEX, EDGE, FULL, LEVELS } level;
enum { OF_VERTEX, OF_EDGE, OF_NEIGHBOUR, KINDS };

typedef struct shared {
    level            consistency;
    pthread_rwlock_t lock[SHARED];
    int64_t          vertex[SHARED], heard[SHARED]; /* updates of a vertex; of its neighbours */
    int64_t          edge[SHARED][2];               /* edge k of vertex v: to vertex (v + 1 + k) % SHARED */
} shared;

/* *x += 1 in two halves, with a pause between them now and then. The halves are atomic, their sum is not. */
static void add_one(int64_t *x, hpml_rng *rng)
{
    const int64_t old = __atomic_load_n(x, __ATOMIC_RELAXED);
    if (hpml_rng_below(rng, 32) == 0) sched_yield();
    __atomic_store_n(x, old + 1, __ATOMIC_RELAXED);
}

/* Locks or unlocks what an update of v needs, in the order of vertices, so that threads never wait in a circle. */
static void lock_scope(shared *s, int v, bool lock)
{
    for (int u = 0; u < SHARED; u++) {
        const int  distance = (u - v + SHARED) % SHARED;
        const bool is_near  = distance <= 2 || distance >= SHARED - 2;
        if (s->consistency == NONE || !is_near || (u != v && s->consistency == VERTEX)) continue;
        if (!lock) pthread_rwlock_unlock(&s->lock[u]);
        else if (u == v || s->consistency == FULL) pthread_rwlock_wrlock(&s->lock[u]);
        else pthread_rwlock_rdlock(&s->lock[u]);
    }
}

static hpml_status update(hpml_comm *c, void *user)
{
    shared  *s   = (shared *)user;
    hpml_rng rng = { .seed = 5, .stream = (uint64_t)hpml_comm_rank(c) };
    hpml_barrier(c);
    for (int i = 0; i < UPDATES; i++) {
        const int v = (int)hpml_rng_below(&rng, SHARED);
        lock_scope(s, v, true);
        add_one(&s->vertex[v], &rng);
        for (int k = 0; k < 2; k++) {
            const int after = (v + 1 + k) % SHARED, before = (v + SHARED - 1 - k) % SHARED;
            add_one(&s->edge[v][k], &rng);
            add_one(&s->edge[before][k], &rng);
            add_one(&s->heard[after], &rng);
            add_one(&s->heard[before], &rng);
        }
        lock_scope(s, v, false);
    }
    return HPML_OK;
}

static int graphlab(void)
{
    static const char *const name[LEVELS] = { "none", "vertex", "edge", "full" };
    printf("%d threads, updates lost of   vertices   edges   neighbours\n", THREADS);
    for (int k = 0; k < LEVELS; k++) {
        static shared          s;
        const shared           empty = { 0 };
        int64_t                lost[KINDS] = { ALL, 4 * ALL, 4 * ALL }; /* minus those that are there */
        const hpml_launch_desc l = { .ranks = THREADS, .alone = true, .ctx = { .threads = 1, .log = hpml_log_stderr } };
        s             = empty;
        s.consistency = (level)k;
        for (int v = 0; v < SHARED; v++) pthread_rwlock_init(&s.lock[v], NULL);
        if (hpml_launch(&l, update, &s, NULL, 0) != HPML_OK) return 1;
        for (int v = 0; v < SHARED; v++) {
            pthread_rwlock_destroy(&s.lock[v]);
            lost[OF_VERTEX] -= s.vertex[v];
            lost[OF_EDGE] -= s.edge[v][0] + s.edge[v][1];
            lost[OF_NEIGHBOUR] -= s.heard[v];
        }
        printf("  consistency %-14s %10lld %7lld %12lld\n", name[k], (long long)lost[OF_VERTEX],
               (long long)lost[OF_EDGE], (long long)lost[OF_NEIGHBOUR]);
        for (int kind = 0; kind < k; kind++) /* level k protects the first k kinds */
            if (lost[kind] != 0) return fprintf(stderr, "consistency %s has lost updates\n", name[k]), 1;
    }
    return 0;
}

int main(int argc, char **argv)
{
    char         error[512], run[32], *end = NULL;
    int          me = 0, processes = hpml_launched(&me);
    const bool   chosen = processes > 1 || (getenv("HPML_RUN") && *getenv("HPML_RUN"));
    const double vertices = argc > 1 ? strtod(argv[1], &end) : 1000;
    graph        g;
    if (argc > 2 || (end && *end) || !(vertices >= 10 && vertices <= 1e6))
        return fprintf(stderr, "usage: supersteps [VERTICES], 10 to 1000000\n"), 2;
    draw_graph(&g, (int)vertices);
    for (int ranks = 1; ranks <= 4; ranks++) {
        hpml_launch_desc l = { .run = processes > 1 ? "mpi" : run, .ctx.threads = 1 };
        snprintf(run, sizeof run, "threads:%d", ranks);
        if (hpml_launch(&l, pregel, &g, error, sizeof error) != HPML_OK) return fprintf(stderr, "%s\n", error), 1;
        if (chosen) break;
    }
    free(g.links);
    free(g.to);
    return me == 0 ? graphlab() : 0;
}
