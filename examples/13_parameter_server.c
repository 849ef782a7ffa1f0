/* What you learn: a parameter server by hand: one thread answers all workers in the order in which they ask, bounds how
   far the fastest may be ahead, and goes on when a worker is lost. Difficulty 3 of 4.
   cc -O2 examples/13_parameter_server.c -o server -lm -lpthread && ./server --help
   mpicc -O2 -DHPML_USE_MPI examples/13_parameter_server.c -o server -lm -lpthread && HPML_RUN=mpi mpiexec -n 3 ./server
   The last rank is the server: it keeps the weights. A worker sends a question (its step, and on which version of the
   weights its gradient was computed), then the gradient; the server steps and answers with the new weights. Without a
   bound that is asynchronous SGD; with --bound 0 no worker begins a step before all have finished the one before; in
   between it is stale synchronous (Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous ...").
   prints   test accuracy 9x.xx %, mean delay, largest lead, bytes, seconds; exit 1 if the accuracy is below 80 %.
   HPML_RUN=clock:9 runs 8 workers in virtual time: the same bits each time; --slow 4 makes worker 0 slower there. */
#define HPML_IMPLEMENTATION
#include "../hpml_comm.h"
#include "digits.h"
#include "options.h"

enum { BATCH = 32, SAMPLES = 4000, TESTS = 1000, HIDDEN = 64, MOST_WORKERS = 64 };
enum { TAG_QUESTION, TAG_GRADIENT, TAG_ANSWER, TAG_WEIGHTS };

typedef struct settings {
    int64_t steps, bound, lost; /* of each worker; lead in steps, -1: any; step in which worker 0 fails, 0: never */
    double  lr, slow;
    double  accuracy; /* set by the server; -1: this process has not run it */
} settings;

typedef struct question { int32_t step, version; } question; /* of the weights with which the gradient was computed */

/* The same classifier on every rank: 784 - 64 - 10. */
typedef struct model {
    hpml_ctx    *ctx;
    hpml_tensor *x, *labels, *logits, *loss; /* (B, 784), (B), (B, 10), one number */
    hpml_graph  *graph;
    int64_t      floats;
    float       *flat; /* (floats) all weights, or all gradients, one after another */
} model;

static model model_create(hpml_ctx *ctx)
{
    const int64_t          batch = BATCH;
    const hpml_linear_desc relu  = { .activation = HPML_ACT_RELU };
    model                  m     = { .ctx = ctx };
    m.x      = hpml_input_2d(ctx, BATCH, DIGITS_PIXELS);
    m.labels = hpml_input(ctx, HPML_DTYPE_I32, 1, &batch);
    m.logits = hpml_linear(hpml_linear(m.x, HIDDEN, &relu), 10, NULL);
    m.loss   = hpml_cross_entropy(m.logits, m.labels, NULL);
    m.graph  = hpml_graph_create(ctx, &(hpml_graph_desc){ .output_count = 1, .outputs = &m.logits, .loss = m.loss });
    hpml_graph_alloc(m.graph);
    m.floats = hpml_param_total(ctx);
    m.flat   = (float *)hpml_ctx_alloc(ctx, sizeof *m.flat * (size_t)m.floats, NULL);
    return m;
}

/* Copies weights or gradients to m->flat (out), or weights from there. */
static void model_copy(model *m, bool gradients, bool out)
{
    float *at = m->flat;
    for (int i = 0; i < hpml_param_count(m->ctx); i++) {
        hpml_tensor  *p     = hpml_param_at(m->ctx, i);
        float        *data  = gradients ? p->grad : p->data;
        const int64_t count = hpml_tensor_count(p);
        memcpy(out ? at : data, out ? data : at, sizeof *at * (size_t)count);
        at += count;
    }
}

/* Draws BATCH digits, from number `first` of `stream` on, into the inputs. */
static void model_load(model *m, uint64_t stream, int64_t first)
{
    uint8_t image[DIGITS_PIXELS];
    for (int i = 0; i < BATCH; i++) {
        ((int32_t *)m->labels->raw)[i] = digits_draw(stream, first + i, image);
        for (int k = 0; k < DIGITS_PIXELS; k++) m->x->data[i * DIGITS_PIXELS + k] = image[k] / 255.0f;
    }
}

static double model_accuracy(model *m)
{
    int right = 0;
    for (int first = 0; first + BATCH <= TESTS; first += BATCH) {
        model_load(m, 2, first);
        hpml_graph_forward(m->graph, false, 0);
        for (int i = 0; i < BATCH; i++) {
            const float *row  = m->logits->data + 10 * i;
            int          best = 0;
            for (int k = 1; k < 10; k++)
                if (row[k] > row[best]) best = k;
            right += best == ((int32_t *)m->labels->raw)[i];
        }
    }
    return (double)right / (TESTS / BATCH * BATCH);
}

/* ---- a worker ---- */

static hpml_status work(hpml_comm *c, const settings *s)
{
    const int   rank = hpml_comm_rank(c), server = hpml_comm_size(c) - 1;
    model       m    = model_create(hpml_comm_ctx(c));
    question    q    = { 0, 0 };
    hpml_status status = hpml_recv(c, server, TAG_WEIGHTS, m.flat, sizeof *m.flat * (size_t)m.floats);
    for (; status == HPML_OK && q.step < s->steps; q.step++) {
        if (rank == 0 && s->lost > 0 && q.step == s->lost)
            return hpml_ctx_fail(m.ctx, HPML_ERR_STATE, "worker 0 fails in step %d, as it was asked to", q.step);
        model_copy(&m, false, false);
        model_load(&m, 1, ((int64_t)q.step * server + rank) * BATCH % SAMPLES);
        hpml_graph_forward(m.graph, true, (uint64_t)q.step);
        hpml_graph_backward(m.graph, 1, false);
        hpml_comm_compute(c, 1e-3); /* in virtual time: what the lines above take */
        model_copy(&m, true, true);
        status = hpml_send(c, server, TAG_QUESTION, &q, sizeof q);
        if (status == HPML_OK) status = hpml_send(c, server, TAG_GRADIENT, m.flat, sizeof *m.flat * (size_t)m.floats);
        if (status == HPML_OK) status = hpml_recv(c, server, TAG_ANSWER, &q.version, sizeof q.version);
        if (status == HPML_OK) status = hpml_recv(c, server, TAG_WEIGHTS, m.flat, sizeof *m.flat * (size_t)m.floats);
    }
    return status;
}

/* ---- the server ---- */

typedef struct server {
    hpml_comm   *c;
    model        m;
    int          workers, living;
    question     q[MOST_WORKERS];
    hpml_message message[MOST_WORKERS], *waiting[MOST_WORKERS]; /* the receive of a question from each worker */
    int          finished[MOST_WORKERS]; /* steps; INT32_MAX: the worker has left or is lost */
    bool         held[MOST_WORKERS];     /* true: the answer waits for slower workers */
    int32_t      version;                /* gradients applied until now */
    int64_t      delay;                  /* sum over gradients: versions that came in between */
    int          lead;                   /* the most steps by which a worker that began one was ahead of another */
    float       *w;                      /* (floats) the weights */
} server;

static void listen_to(server *s, int r)
{
    s->waiting[r] = &s->message[r];
    hpml_irecv(s->c, r, TAG_QUESTION, &s->q[r], sizeof s->q[r], s->waiting[r]);
}

/* Answers all workers whose answer is held and who are at most `bound` steps ahead of the slowest. The next question is
   received before the answer is sent; a worker that is lost meanwhile is found by its next question. */
static void answer(server *s, const settings *set)
{
    int slowest = INT32_MAX;
    for (int r = 0; r < s->workers; r++)
        if (s->finished[r] < slowest) slowest = s->finished[r];
    for (int r = 0; r < s->workers; r++) {
        const int lead = s->finished[r] - slowest;
        if (!s->held[r] || (set->bound >= 0 && lead > set->bound)) continue;
        if (lead > s->lead) s->lead = lead;
        s->held[r] = false;
        listen_to(s, r);
        hpml_send(s->c, r, TAG_ANSWER, &s->version, sizeof s->version);
        hpml_send(s->c, r, TAG_WEIGHTS, s->w, sizeof *s->w * (size_t)s->m.floats);
    }
}

/* Takes the gradient of worker r, whose question has come, and steps. */
static hpml_status apply(server *s, int r, float lr)
{
    hpml_status status = hpml_recv(s->c, r, TAG_GRADIENT, s->m.flat, sizeof *s->m.flat * (size_t)s->m.floats);
    if (status != HPML_OK) return status;
    for (int64_t i = 0; i < s->m.floats; i++) s->w[i] -= lr * s->m.flat[i];
    s->delay += s->version - s->q[r].version;
    s->version++;
    s->finished[r] = s->q[r].step + 1;
    s->held[r]     = true;
    return HPML_OK;
}

static hpml_status serve(hpml_comm *c, settings *set)
{
    server       s     = { .c = c, .m = model_create(hpml_comm_ctx(c)), .workers = hpml_comm_size(c) - 1 };
    const size_t bytes = sizeof(float) * (size_t)s.m.floats;
    const double start = hpml_comm_now(c);
    s.w      = (float *)hpml_ctx_alloc(s.m.ctx, bytes, NULL);
    s.living = s.workers;
    if (!s.w || !s.m.flat) return hpml_ctx_status(s.m.ctx);
    model_copy(&s.m, false, true);
    memcpy(s.w, s.m.flat, bytes);
    for (int r = 0; r < s.workers; r++) {
        listen_to(&s, r);
        hpml_send(c, r, TAG_WEIGHTS, s.w, bytes);
    }
    while (s.living > 0) {
        const int r = hpml_wait_any(c, s.waiting, s.workers, -1);
        if (r < 0) return hpml_ctx_status(s.m.ctx);
        s.waiting[r] = NULL;
        if (s.message[r].status != HPML_OK || apply(&s, r, (float)set->lr / (float)s.workers) != HPML_OK) {
            s.finished[r] = INT32_MAX; /* has left after its last step, or is lost: the bound waits no more for it */
            s.living--;
        }
        answer(&s, set);
    }
    hpml_counters k;
    hpml_comm_counters(c, &k);
    memcpy(s.m.flat, s.w, bytes);
    model_copy(&s.m, false, false);
    const double each = s.version > 0 ? (double)s.delay / s.version : 0;
    set->accuracy     = model_accuracy(&s.m);
    printf("test accuracy %.2f %%  %d gradients, %d workers, delay %.1f, largest lead %d\n", 100 * set->accuracy,
           (int)s.version, s.workers, each, s.lead);
    printf("the server has sent %.1f MB in %.2f s (%s)  weights %016llx\n", 1e-6 * (double)k.bytes,
           hpml_comm_now(c) - start, hpml_comm_transport(c), (unsigned long long)hpml_param_hash(s.m.ctx));
    return hpml_ctx_status(s.m.ctx);
}

static hpml_status rank_main(hpml_comm *c, void *user)
{
    const int workers = hpml_comm_size(c) - 1;
    if (workers < 1 || workers > MOST_WORKERS)
        return hpml_ctx_fail(hpml_comm_ctx(c), HPML_ERR_ARGUMENT, "%d ranks: a server and 1 to 64 workers are needed",
                             workers + 1);
    return hpml_comm_rank(c) == workers ? serve(c, (settings *)user) : work(c, (settings *)user);
}

int main(int argc, char **argv)
{
    settings     s     = { .steps = 200, .bound = -1, .lr = 0.6, .slow = 1, .accuracy = -1 };
    const option all[] = {
        { "--steps", OPTION_COUNT, &s.steps, "N", "steps of each worker (200)" },
        { "--bound", OPTION_COUNT, &s.bound, "N", "no worker is more steps ahead (no bound)" },
        { "--lr", OPTION_REAL, &s.lr, "X", "learning rate, shared by the workers (0.6)" },
        { "--slow", OPTION_REAL, &s.slow, "X", "virtual time: worker 0 takes X times as long (1)" },
        { "--lose", OPTION_COUNT, &s.lost, "N", "worker 0 fails in step N (never)" },
    };
    int code = options_read("server: HPML_RUN=threads:5, clock:5 or mpi chooses the ranks", all, 5, argc, argv);
    if (code != 0) return code - 1;
    double slow[MOST_WORKERS + 1] = { s.slow };
    char   error[768];
    for (int i = 1; i <= MOST_WORKERS; i++) slow[i] = 1;
    hpml_launch_desc d = { .run = "threads:5", .survive = true, .network.slow = slow };
    d.ctx.threads      = 1;
    d.ctx.seed         = 1;
    hpml_status status = hpml_launch(&d, rank_main, &s, error, sizeof error);
    if (error[0]) printf("%s\n", error);
    return status != HPML_OK || (s.accuracy >= 0 && s.accuracy < 0.8);
}
