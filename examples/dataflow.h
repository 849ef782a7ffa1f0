/* A small dataflow runtime over hpml_comm.h, with the parts of TensorFlow's (Abadi et al. 2016), lazy fusion as in
   FlumeJava (Chambers et al. 2010), branches that depend on data as in CIEL (Murray et al. 2011), loops and a progress
   frontier as in Naiad (Murray et al. 2013). Include hpml_comm.h before.
     client     the program records nodes (flow_constant, flow_map, ...), each with the rank that executes it. All ranks
                record the same graph. Nothing is computed yet.
     master     flow_plan keeps the nodes that the fetched ones need (prune), merges maps that follow each other (fuse),
                and gives each rank its part: a tensor that another rank needs gets one send and one receive node.
     workers    each rank executes its part: a node fires when its inputs have come (ready queue).
   Variables persist from run to run. A tensor is freed when its last reader has fired.
   Values that fire a node are tokens: a tag, and a tensor or nothing. A token without a tensor is dead: it comes from
   the side of a branch that is not taken. A node with a dead input computes nothing and sends a dead token on.
   Limits: f32; two inputs a node; a search through all nodes for the readers of a token. */
#ifndef DATAFLOW_H
#define DATAFLOW_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum { FLOW_NODES = 64, FLOW_STEPS = 8, FLOW_EPOCHS = 8, FLOW_TAG_PROGRESS = 1000 };
enum { FLOW_FAILED = -1, FLOW_NONE = -2 }; /* instead of a node's number: creating it has failed; no such input */

typedef enum flow_kind {
    FLOW_CONSTANT, FLOW_VARIABLE, FLOW_INPUT, FLOW_ADD, FLOW_MULTIPLY, FLOW_MATMUL, FLOW_SUM, FLOW_MAP, FLOW_ASSIGN_ADD,
    FLOW_GATE,    /* passes its first input if the second one is `want`, else a dead token */
    FLOW_MERGE,   /* passes the one of its inputs that is not dead */
    FLOW_UNION,   /* passes each token that comes to either input: the head of a loop, or two streams in one */
    FLOW_FEWER,   /* 1 if its input has gone through fewer iterations than `want`, else 0 */
    FLOW_NEXT,    /* the end of a loop's body: begins the next iteration; drops dead tokens */
    FLOW_EXIT,    /* leaves a loop; drops dead tokens */
    FLOW_COLLECT, /* end of a stream: adds up what comes in each epoch */
    FLOW_SEND, FLOW_RECEIVE /* inserted by flow_plan */
} flow_kind;

/* Which computation a token belongs to. A run has one tag, all zero; a stream has one for each record. */
typedef struct flow_tag { int32_t epoch, record, iteration; } flow_tag;
/* Fills in an input's next tensor. In a stream it also sets tag->epoch, which never falls; false: there is no further
   tensor. */
typedef bool flow_feed(void *user, flow_tag *tag, float *x);
/* Gets the sum of an epoch and its number of tokens, in the order of the epochs, once no more of them can come. */
typedef void flow_deliver(void *user, int epoch, const float *sum, int tokens);

typedef struct flow_tensor {
    int    users; /* tokens, and results, that have it */
    float *x;     /* (rows, cols) */
} flow_tensor;

typedef struct flow_node {
    const char   *name;
    flow_kind     kind;
    int           rank, rows, cols;
    int           input[2], inputs; /* as recorded */
    int           variable, want;   /* of ASSIGN_ADD; of GATE and FEWER */
    float       (*map)(float);
    flow_feed    *feed;             /* of INPUT */
    flow_deliver *deliver;          /* of COLLECT */
    void         *user;
    float        *kept;             /* value of CONSTANT and VARIABLE; COLLECT: (FLOW_EPOCHS, rows, cols) sums */
    int           tokens[FLOW_EPOCHS]; /* COLLECT: tokens in each sum */
    int64_t       fired;            /* on this rank, dead tokens apart */
    /* The plan: */
    bool          needed, fetched;
    int           from[2];          /* inputs after fusion, with receive nodes for tensors of other ranks */
    float       (*step[FLOW_STEPS])(float); /* MAP: functions, in one pass over the tensor */
    int           steps, peer, pair; /* SEND and RECEIVE: the other rank, the other node */
    /* The run: */
    flow_tensor  *result;           /* of a fetched node, on its rank */
    int           epoch;            /* INPUT of a stream: of its last record; -1: at its end */
} flow_node;

/* A node and a tag for which at least one input has come. */
typedef struct flow_instance {
    struct flow_instance *next;
    int                   node, arrived, dead;
    flow_tag              tag;
    flow_tensor          *value[2];
} flow_instance;

typedef enum flow_state { FLOW_ALIVE, FLOW_DEAD, FLOW_END } flow_state;
typedef struct flow_header { flow_tag tag; int32_t state; } flow_header; /* begins each message */
typedef struct flow_channel {   /* the receive of a RECEIVE node, or of another rank's progress */
    hpml_message m;
    int          node, peer;    /* node -1: progress */
    char        *buffer;
    size_t       bytes;
} flow_channel;
typedef struct flow_sending {   /* a send in flight; its message follows in memory */
    hpml_message         m;
    struct flow_sending *next;
} flow_sending;

typedef struct flow {
    hpml_comm     *c;
    hpml_ctx      *ctx;
    int            rank, ranks;
    bool           fuse;          /* set it before a run: maps that follow each other become one */
    double       (*seconds)(const struct flow *f, const flow_node *n); /* a node's virtual time; NULL: all take none */
    flow_node      node[FLOW_NODES];
    int            made, count;   /* nodes recorded; with those of the plan */
    int            pairs;         /* send and receive pairs in the plan, of all ranks */
    int64_t        passes;        /* over tensors, by maps of this rank */
    flow_instance *waiting, *ready, **last; /* lists; the address of the ready queue's last link */
    flow_sending  *sending;
    flow_channel  *channel;       /* (channels) */
    hpml_message **inbox;         /* (channels) for hpml_wait_any */
    int            channels, left; /* left: nodes of this rank that have not fired in a run */
    bool           streaming;
    int            delivered;     /* epochs of a stream that are delivered */
    int32_t        events[FLOW_NODES * FLOW_EPOCHS]; /* outstanding in a stream, for each node and epoch */
    int32_t        news[FLOW_NODES * FLOW_EPOCHS];   /* changes of `events` that other ranks do not know yet */
} flow;

/* ---- client: recording nodes ---- */

static flow *flow_create(hpml_comm *c)
{
    flow *f = (flow *)hpml_ctx_alloc(hpml_comm_ctx(c), sizeof *f, NULL);
    if (!f) return NULL;
    f->c     = c;
    f->ctx   = hpml_comm_ctx(c);
    f->rank  = hpml_comm_rank(c);
    f->ranks = hpml_comm_size(c);
    f->last  = &f->ready;
    return f;
}

/* Records a node of a's shape. rank: modulo the number of ranks, so that a graph for two ranks also runs on one. */
static int flow_record(flow *f, flow_kind kind, const char *name, int rank, int a, int b)
{
    if (!f || a == FLOW_FAILED || b == FLOW_FAILED) return FLOW_FAILED;
    if (f->made == FLOW_NODES) {
        hpml_ctx_fail(f->ctx, HPML_ERR_ARGUMENT, "node \"%s\": a graph has %d nodes at most", name, FLOW_NODES);
        return FLOW_FAILED;
    }
    flow_node *n = &f->node[f->made];
    n->name     = name;
    n->kind     = kind;
    n->rank     = rank % f->ranks;
    n->input[0] = a;
    n->input[1] = b;
    n->inputs   = (a != FLOW_NONE) + (b != FLOW_NONE);
    n->rows     = a >= 0 ? f->node[a].rows : 1;
    n->cols     = a >= 0 ? f->node[a].cols : 1;
    return f->made++;
}

/* Two inputs of equal shapes: FLOW_ADD, FLOW_MULTIPLY, FLOW_MERGE, FLOW_UNION. */
static int flow_pair(flow *f, flow_kind kind, const char *name, int rank, int a, int b)
{
    if (a >= 0 && b >= 0 && (f->node[a].rows != f->node[b].rows || f->node[a].cols != f->node[b].cols)) {
        hpml_ctx_fail(f->ctx, HPML_ERR_SHAPE, "node \"%s\": \"%s\" is %dx%d, \"%s\" is %dx%d", name, f->node[a].name,
                      f->node[a].rows, f->node[a].cols, f->node[b].name, f->node[b].rows, f->node[b].cols);
        return FLOW_FAILED;
    }
    return flow_record(f, kind, name, rank, a, b);
}

/* A node without inputs; a constant or a variable begins as a copy of x, or with zeros where x is NULL. */
static int flow_source(flow *f, flow_kind kind, const char *name, int rank, int rows, int cols, const float *x)
{
    const int id = flow_record(f, kind, name, rank, FLOW_NONE, FLOW_NONE);
    if (id < 0) return id;
    flow_node   *n     = &f->node[id];
    const size_t bytes = sizeof(float) * (size_t)rows * (size_t)cols;
    n->rows = rows;
    n->cols = cols;
    if (kind == FLOW_INPUT) return id;
    n->kept = (float *)hpml_ctx_alloc(f->ctx, bytes, NULL);
    if (!n->kept) return FLOW_FAILED;
    if (x) memcpy(n->kept, x, bytes);
    return id;
}

static inline int flow_constant(flow *f, const char *name, int rank, float x)
{
    return flow_source(f, FLOW_CONSTANT, name, rank, 1, 1, &x);
}

static int flow_input(flow *f, const char *name, int rank, int rows, int cols, flow_feed *feed, void *user)
{
    const int id = flow_source(f, FLOW_INPUT, name, rank, rows, cols, NULL);
    if (id < 0) return id;
    f->node[id].feed = feed;
    f->node[id].user = user;
    return id;
}

static int flow_matmul(flow *f, const char *name, int rank, int a, int b)
{
    if (a >= 0 && b >= 0 && f->node[a].cols != f->node[b].rows) {
        hpml_ctx_fail(f->ctx, HPML_ERR_SHAPE, "matmul \"%s\": \"%s\" is %dx%d, \"%s\" is %dx%d", name, f->node[a].name,
                      f->node[a].rows, f->node[a].cols, f->node[b].name, f->node[b].rows, f->node[b].cols);
        return FLOW_FAILED;
    }
    const int id = flow_record(f, FLOW_MATMUL, name, rank, a, b);
    if (id >= 0) f->node[id].cols = f->node[b].cols;
    return id;
}

static int flow_map(flow *f, const char *name, int rank, int a, float (*map)(float))
{
    const int id = flow_record(f, FLOW_MAP, name, rank, a, FLOW_NONE);
    if (id >= 0) f->node[id].map = map;
    return id;
}

static int flow_sum(flow *f, const char *name, int rank, int a)
{
    const int id = flow_record(f, FLOW_SUM, name, rank, a, FLOW_NONE);
    if (id < 0) return id;
    f->node[id].rows = 1;
    f->node[id].cols = 1;
    return id;
}

/* variable += a, on the variable's rank; the node's value is the variable's new one. */
static inline int flow_assign_add(flow *f, const char *name, int variable, int a)
{
    if (variable < 0 || a < 0) return FLOW_FAILED;
    const int id = flow_pair(f, FLOW_ASSIGN_ADD, name, f->node[variable].rank, a, variable);
    if (id < 0) return id;
    f->node[id].variable = variable;
    f->node[id].inputs   = 1; /* the variable is not read as a token */
    return id;
}

static inline int flow_gate(flow *f, const char *name, int rank, int a, int condition, int want)
{
    const int id = flow_record(f, FLOW_GATE, name, rank, a, condition);
    if (id >= 0) f->node[id].want = want;
    return id;
}

static inline int flow_fewer(flow *f, const char *name, int rank, int a, int iterations)
{
    const int id = flow_record(f, FLOW_FEWER, name, rank, a, FLOW_NONE);
    if (id < 0) return id;
    f->node[id].want = iterations;
    f->node[id].rows = 1;
    f->node[id].cols = 1;
    return id;
}

/* Closes a loop: what `body` computes is the next iteration's input of `head`, a FLOW_UNION with one input. */
static inline int flow_next(flow *f, const char *name, int rank, int head, int body)
{
    const int id = flow_pair(f, FLOW_NEXT, name, rank, body, head);
    if (id < 0) return id;
    f->node[id].inputs       = 1;
    f->node[head].input[1] = id;
    f->node[head].inputs     = 2;
    return id;
}

static inline int flow_collect(flow *f, const char *name, int rank, int a, flow_deliver *deliver, void *user)
{
    const int id = flow_record(f, FLOW_COLLECT, name, rank, a, FLOW_NONE);
    if (id < 0) return id;
    flow_node *n = &f->node[id];
    n->deliver = deliver;
    n->user    = user;
    n->kept    = (float *)hpml_ctx_alloc(f->ctx, sizeof(float) * FLOW_EPOCHS * (size_t)(n->rows * n->cols), NULL);
    return n->kept ? id : FLOW_FAILED;
}

/* The number of the node with this name; FLOW_NONE: there is none. */
static inline int flow_find(const flow *f, const char *name)
{
    for (int i = 0; i < f->made; i++)
        if (strcmp(f->node[i].name, name) == 0) return i;
    return FLOW_NONE;
}

/* ---- master: pruning, fusion, partition ---- */

static void flow_drop(flow *f, flow_tensor *t)
{
    if (t && --t->users == 0) hpml_ctx_release(f->ctx, t);
}

static void flow_need(flow *f, int id)
{
    flow_node *n = &f->node[id];
    if (n->needed) return;
    n->needed = true;
    for (int k = 0; k < n->inputs; k++) flow_need(f, n->from[k]);
}

static int flow_readers(const flow *f, int id)
{
    int readers = 0;
    for (int j = 0; j < f->count; j++)
        for (int k = 0; k < f->node[j].inputs; k++) readers += f->node[j].needed && f->node[j].from[k] == id;
    return readers;
}

/* A map whose input is a map with no other reader, on the same rank, takes over that map's functions. */
static void flow_fuse(flow *f)
{
    for (int j = 0; j < f->made; j++) {
        flow_node *n = &f->node[j], *before;
        if (!n->needed || n->kind != FLOW_MAP) continue;
        before = &f->node[n->from[0]];
        if (before->kind != FLOW_MAP || before->rank != n->rank || before->fetched) continue;
        if (before->steps + n->steps > FLOW_STEPS || flow_readers(f, n->from[0]) > 1) continue;
        memmove(n->step + before->steps, n->step, sizeof n->step[0] * (size_t)n->steps);
        memcpy(n->step, before->step, sizeof n->step[0] * (size_t)before->steps);
        n->steps      += before->steps;
        n->from[0]     = before->from[0];
        before->needed = false;
    }
}

/* Adds the node at the end of the list for one side of a cut. */
static int flow_insert(flow *f, flow_kind kind, int tensor, int rank, int peer)
{
    const int  id = f->count++;
    flow_node *n  = &f->node[id];
    memset(n, 0, sizeof *n);
    n->name   = f->node[tensor].name;
    n->kind   = kind;
    n->rank   = rank;
    n->peer   = peer;
    n->rows   = f->node[tensor].rows;
    n->cols   = f->node[tensor].cols;
    n->needed = true;
    return id;
}

/* Tensor `id`, if rank r has readers of it: one send node, one receive node, from which all readers on r take it. */
static hpml_status flow_cut(flow *f, int id, int r)
{
    int send = FLOW_NONE, receive = FLOW_NONE;
    for (int j = 0; j < f->made; j++)
        for (int k = 0; k < f->node[j].inputs; k++) {
            flow_node *reader = &f->node[j];
            if (!reader->needed || reader->rank != r || reader->from[k] != id) continue;
            if (send == FLOW_NONE && f->count + 2 > FLOW_NODES)
                return hpml_ctx_fail(f->ctx, HPML_ERR_ARGUMENT, "more than %d nodes with sends and receives",
                                     FLOW_NODES);
            if (send == FLOW_NONE) {
                send    = flow_insert(f, FLOW_SEND, id, f->node[id].rank, r);
                receive = flow_insert(f, FLOW_RECEIVE, id, r, f->node[id].rank);
                f->node[send].inputs  = 1;
                f->node[send].from[0] = id;
                f->node[send].pair    = receive;
                f->node[receive].pair = send;
                f->pairs++;
            }
            reader->from[k] = receive;
        }
    return HPML_OK;
}

static hpml_status flow_plan(flow *f, const int *fetch, int count)
{
    f->count = f->made;
    f->pairs = 0;
    for (int i = 0; i < f->made; i++) {
        flow_node *n = &f->node[i];
        n->needed  = false;
        n->fetched = false;
        n->steps   = n->kind == FLOW_MAP;
        n->step[0] = n->map;
        memcpy(n->from, n->input, sizeof n->from);
    }
    for (int i = 0; i < count; i++) {
        if (fetch[i] < 0 || fetch[i] >= f->made)
            return hpml_ctx_fail(f->ctx, HPML_ERR_ARGUMENT, "the graph has no node %d to fetch", fetch[i]);
        flow_need(f, fetch[i]);
        f->node[fetch[i]].fetched = true;
        flow_drop(f, f->node[fetch[i]].result);
        f->node[fetch[i]].result = NULL;
    }
    if (f->fuse) flow_fuse(f);
    hpml_status status = HPML_OK;
    for (int i = 0; i < f->made && status == HPML_OK; i++)
        for (int r = 0; r < f->ranks && status == HPML_OK; r++)
            if (f->node[i].needed && f->node[i].rank != r) status = flow_cut(f, i, r);
    return status;
}

/* ---- workers: tensors and tokens ---- */

static flow_tensor *flow_tensor_create(flow *f, const flow_node *n)
{
    const size_t count = (size_t)n->rows * (size_t)n->cols;
    flow_tensor *t     = (flow_tensor *)hpml_ctx_alloc(f->ctx, sizeof *t + sizeof(float) * count, NULL);
    if (!t) return NULL;
    t->users = 1;
    t->x     = (float *)(t + 1);
    return t;
}

static flow_tensor *flow_share(flow_tensor *t)
{
    if (t) t->users++;
    return t;
}

/* Counts events of a stream: tokens on their way to a node, and inputs that are not at their end. */
static void flow_event(flow *f, int node, int epoch, int change)
{
    f->events[node * FLOW_EPOCHS + epoch] += change;
    f->news[node * FLOW_EPOCHS + epoch] += change;
}

static void flow_make_ready(flow *f, flow_instance *i)
{
    i->next  = NULL;
    *f->last = i;
    f->last  = &i->next;
}

/* A token for input k of a node: the node fires when all inputs of this tag have come; a union fires at once. */
static void flow_give(flow *f, int node, int k, flow_tag tag, flow_tensor *t)
{
    flow_instance **at = &f->waiting, *i;
    while (*at && ((*at)->node != node || memcmp(&(*at)->tag, &tag, sizeof tag) != 0)) at = &(*at)->next;
    if (!*at) {
        *at = (flow_instance *)hpml_ctx_alloc(f->ctx, sizeof **at, NULL);
        if (!*at) return;
        (*at)->node = node;
        (*at)->tag  = tag;
    }
    i = *at;
    i->value[k] = flow_share(t);
    i->arrived++;
    i->dead += t == NULL;
    flow_event(f, node, tag.epoch, 1);
    if (i->arrived < f->node[node].inputs && f->node[node].kind != FLOW_UNION) return;
    *at = i->next;
    flow_make_ready(f, i);
}

/* Gives what a node has computed (NULL: a dead token) to its readers on this rank; uses up a reference to t. */
static void flow_emit(flow *f, int id, flow_tag tag, flow_tensor *t)
{
    for (int j = 0; j < f->count; j++)
        for (int k = 0; k < f->node[j].inputs; k++)
            if (f->node[j].needed && f->node[j].rank == f->rank && f->node[j].from[k] == id)
                flow_give(f, j, k, tag, t);
    if (f->node[id].fetched && t) {
        flow_drop(f, f->node[id].result);
        f->node[id].result = flow_share(t);
    }
    flow_drop(f, t);
}

/* ---- workers: what nodes compute ---- */

static void flow_compute_into(flow *f, flow_node *n, flow_tag tag, flow_tensor *const *in, float *y)
{
    const int    count = n->rows * n->cols;
    const float *a = in[0] ? in[0]->x : n->kept, *b = in[1] ? in[1]->x : NULL;
    float       *variable = n->kind == FLOW_ASSIGN_ADD ? f->node[n->variable].kept : NULL;
    const int    inner = n->kind == FLOW_MATMUL ? f->node[n->input[0]].cols : 0;
    const int    all   = n->kind == FLOW_SUM ? f->node[n->input[0]].rows * f->node[n->input[0]].cols : 0;
    switch (n->kind) {
    case FLOW_CONSTANT:
    case FLOW_VARIABLE: memcpy(y, a, sizeof *y * (size_t)count); break;
    case FLOW_INPUT:
        if (!n->feed(n->user, &tag, y)) hpml_ctx_fail(f->ctx, HPML_ERR_STATE, "input \"%s\" is at its end", n->name);
        break;
    case FLOW_ADD:
        for (int i = 0; i < count; i++) y[i] = a[i] + b[i];
        break;
    case FLOW_MULTIPLY:
        for (int i = 0; i < count; i++) y[i] = a[i] * b[i];
        break;
    case FLOW_MATMUL:
        hpml_sgemm(f->ctx, false, false, n->rows, n->cols, inner, 1, a, inner, b, n->cols, 0, y, n->cols);
        break;
    case FLOW_SUM:
        for (int i = 0; i < all; i++) y[0] += a[i];
        break;
    case FLOW_MAP:
        for (int i = 0; i < count; i++) {
            y[i] = a[i];
            for (int s = 0; s < n->steps; s++) y[i] = n->step[s](y[i]);
        }
        f->passes++;
        break;
    case FLOW_ASSIGN_ADD:
        for (int i = 0; i < count; i++) variable[i] += a[i];
        memcpy(y, variable, sizeof *y * (size_t)count);
        break;
    case FLOW_FEWER: y[0] = tag.iteration < n->want; break;
    default: break; /* nodes that compute nothing: flow_compute */
    }
}

/* Returns the node's tensor, with a reference for the caller; NULL: a dead token, or an error. */
static flow_tensor *flow_compute(flow *f, flow_node *n, flow_tag tag, flow_tensor *const *in)
{
    flow_tensor *y;
    switch (n->kind) {
    case FLOW_GATE: return (int)in[1]->x[0] == n->want ? flow_share(in[0]) : NULL;
    case FLOW_MERGE:
    case FLOW_UNION: return flow_share(in[0] ? in[0] : in[1]);
    case FLOW_NEXT:
    case FLOW_EXIT: return flow_share(in[0]);
    case FLOW_COLLECT:
        for (int i = 0; i < n->rows * n->cols; i++) n->kept[tag.epoch * n->rows * n->cols + i] += in[0]->x[i];
        n->tokens[tag.epoch]++;
        return NULL;
    default: break;
    }
    y = flow_tensor_create(f, n);
    if (y) flow_compute_into(f, n, tag, in, y->x);
    if (f->seconds) hpml_comm_compute(f->c, f->seconds(f, n));
    return y;
}

/* ---- workers: messages ---- */

/* Begins to send a header and `bytes` bytes of data (NULL: zeros); flow_sweep frees the message. */
static void flow_post(flow *f, int peer, int tag, flow_header header, const void *data, size_t bytes)
{
    flow_sending *s = (flow_sending *)hpml_ctx_alloc(f->ctx, sizeof *s + sizeof header + bytes, NULL);
    if (!s) return;
    char *message = (char *)(s + 1);
    memcpy(message, &header, sizeof header);
    if (data) memcpy(message + sizeof header, data, bytes);
    s->next    = f->sending;
    f->sending = s;
    hpml_isend(f->c, peer, tag, message, sizeof header + bytes, &s->m);
}

/* Frees the messages that have been sent; `all`: waits for them. */
static void flow_sweep(flow *f, bool all)
{
    for (flow_sending **at = &f->sending; *at;) {
        flow_sending *s = *at;
        if (all) hpml_wait(f->c, &s->m);
        if (!all && !hpml_test(f->c, &s->m)) {
            at = &s->next;
            continue;
        }
        *at = s->next;
        hpml_ctx_release(f->ctx, s);
    }
}

static size_t flow_bytes(const flow_node *n) { return sizeof(float) * (size_t)n->rows * (size_t)n->cols; }

static void flow_send(flow *f, const flow_node *n, flow_tag tag, const flow_tensor *t)
{
    const flow_header header = { tag, t ? FLOW_ALIVE : FLOW_DEAD };
    flow_post(f, n->peer, n->pair, header, t ? t->x : NULL, flow_bytes(n));
    flow_event(f, n->pair, tag.epoch, 1);
}

static void flow_listen(flow *f, int k)
{
    flow_channel *ch = &f->channel[k];
    f->inbox[k] = &ch->m;
    hpml_irecv(f->c, ch->peer, ch->node < 0 ? FLOW_TAG_PROGRESS : ch->node, ch->buffer, ch->bytes, &ch->m);
}

/* Begins a receive for each RECEIVE node of this rank and, for a stream, for the progress of each other rank. */
static hpml_status flow_open(flow *f)
{
    f->channel  = (flow_channel *)hpml_ctx_alloc(f->ctx, sizeof *f->channel * (size_t)(f->count + f->ranks), NULL);
    f->inbox    = (hpml_message **)hpml_ctx_alloc(f->ctx, sizeof *f->inbox * (size_t)(f->count + f->ranks), NULL);
    f->channels = 0;
    if (!f->channel || !f->inbox) return HPML_ERR_MEMORY;
    for (int i = 0; i < f->count + f->ranks; i++) {
        const bool       is_node = i < f->count;
        const flow_node *n       = is_node ? &f->node[i] : NULL;
        flow_channel    *ch      = &f->channel[f->channels];
        if (is_node && (n->kind != FLOW_RECEIVE || n->rank != f->rank)) continue;
        if (!is_node && (!f->streaming || i - f->count == f->rank)) continue;
        ch->node   = is_node ? i : -1;
        ch->peer   = is_node ? n->peer : i - f->count;
        ch->bytes  = sizeof(flow_header) + (is_node ? flow_bytes(n) : sizeof f->news);
        ch->buffer = (char *)hpml_ctx_alloc(f->ctx, ch->bytes, NULL);
        if (!ch->buffer) return HPML_ERR_MEMORY;
        flow_listen(f, f->channels++);
    }
    return hpml_ctx_status(f->ctx);
}

/* Takes the message of channel k, and receives the next one of a stream unless this one is the last. */
static void flow_receive(flow *f, int k)
{
    const flow_channel *ch = &f->channel[k];
    flow_header         header;
    f->inbox[k] = NULL;
    memcpy(&header, ch->buffer, sizeof header);
    if (header.state == FLOW_END) return;
    if (ch->node < 0) {
        const int32_t *news = (const int32_t *)(const void *)(ch->buffer + sizeof header);
        for (int i = 0; i < FLOW_NODES * FLOW_EPOCHS; i++) f->events[i] += news[i];
    } else {
        flow_tensor *t = header.state == FLOW_ALIVE ? flow_tensor_create(f, &f->node[ch->node]) : NULL;
        if (t) memcpy(t->x, ch->buffer + sizeof header, flow_bytes(&f->node[ch->node]));
        flow_event(f, ch->node, header.tag.epoch, -1);
        flow_emit(f, ch->node, header.tag, t);
        f->node[ch->node].fired++;
        f->left--;
    }
    if (f->streaming) flow_listen(f, k);
}

/* ---- workers: the ready queue ---- */

static void flow_fire(flow *f)
{
    flow_instance *i   = f->ready;
    flow_node     *n   = &f->node[i->node];
    flow_tag       tag = i->tag;
    const bool     is_dead = i->dead > 0 && (n->kind != FLOW_MERGE || i->dead == 2);
    f->ready = i->next;
    if (!f->ready) f->last = &f->ready;
    if (n->kind == FLOW_SEND) {
        flow_send(f, n, tag, i->value[0]);
    } else {
        flow_tensor *y = is_dead ? NULL : flow_compute(f, n, tag, i->value);
        if (n->kind == FLOW_NEXT) tag.iteration++;
        if (n->kind == FLOW_EXIT) tag.iteration = 0;
        if (!is_dead || (n->kind != FLOW_NEXT && n->kind != FLOW_EXIT)) flow_emit(f, i->node, tag, y);
    }
    flow_event(f, i->node, i->tag.epoch, -i->arrived);
    n->fired += !is_dead;
    f->left--;
    for (int k = 0; k < 2; k++) flow_drop(f, i->value[k]);
    hpml_ctx_release(f->ctx, i);
}

static int flow_channels_open(const flow *f)
{
    int open = 0;
    for (int k = 0; k < f->channels; k++) open += f->inbox[k] != NULL;
    return open;
}

/* Takes a message, for which it waits `seconds` (negative: until the deadline); false: none has come. */
static bool flow_take(flow *f, double seconds)
{
    if (flow_channels_open(f) == 0) {
        if (seconds < 0) hpml_ctx_fail(f->ctx, HPML_ERR_STATE, "a node waits for an input that does not come");
        return false;
    }
    const int k = hpml_wait_any(f->c, f->inbox, f->channels, seconds);
    if (k >= 0) flow_receive(f, k);
    return k >= 0;
}

static void flow_close(flow *f)
{
    flow_sweep(f, true);
    for (int k = 0; k < f->channels; k++) {
        if (f->inbox[k]) hpml_wait(f->c, f->inbox[k]); /* after an error: gives the receive up */
        hpml_ctx_release(f->ctx, f->channel[k].buffer);
    }
    hpml_ctx_release(f->ctx, f->channel);
    hpml_ctx_release(f->ctx, f->inbox);
    f->channels  = 0;
    f->channel   = NULL;
    f->inbox     = NULL;
    f->streaming = false;
}

/* One run: computes the fetched nodes, and what they need, once. Collective. */
static hpml_status flow_run(flow *f, const int *fetch, int count)
{
    if (!f) return HPML_ERR_ARGUMENT;
    hpml_status status = flow_plan(f, fetch, count);
    f->left = 0;
    for (int i = 0; i < f->count && status == HPML_OK; i++) {
        const flow_node *n = &f->node[i];
        if (n->needed && (n->kind == FLOW_NEXT || n->kind == FLOW_COLLECT))
            return hpml_ctx_fail(f->ctx, HPML_ERR_ARGUMENT, "node \"%s\": loops and collectors are for flow_stream",
                                 n->name);
        if (!n->needed || n->rank != f->rank) continue;
        f->left++;
        if (n->inputs > 0 || n->kind == FLOW_RECEIVE) continue;
        flow_instance *first = (flow_instance *)hpml_ctx_alloc(f->ctx, sizeof *first, NULL);
        if (!first) return HPML_ERR_MEMORY;
        first->node = i;
        flow_make_ready(f, first);
    }
    if (status == HPML_OK) status = flow_open(f);
    while (f->left > 0 && status == HPML_OK) {
        if (f->ready) flow_fire(f);
        else flow_take(f, -1);
        flow_sweep(f, false);
        status = hpml_ctx_status(f->ctx);
    }
    flow_close(f);
    return hpml_ctx_status(f->ctx);
}

/* The value of a fetched node after flow_run, on the node's rank; NULL: on other ranks, or dead. */
static const float *flow_result(const flow *f, int id)
{
    return id >= 0 && f->node[id].result ? f->node[id].result->x : NULL;
}

/* The first element of a fetched node's value, on all ranks; 0: dead. Collective. */
static float flow_fetched(flow *f, int id)
{
    float x = flow_result(f, id) ? flow_result(f, id)[0] : 0;
    hpml_broadcast(f->c, &x, sizeof x, f->node[id].rank);
    return x;
}

/* How often a node has computed, on whichever rank. Collective. */
static inline int64_t flow_fired(flow *f, int id)
{
    int64_t                   fired = id >= 0 ? f->node[id].fired : 0;
    const hpml_allreduce_desc sum   = { .element = HPML_ELEMENT_I64 };
    hpml_allreduce(f->c, &fired, 1, &sum);
    return fired;
}

/* ---- streams: loops, epochs, the progress frontier ---- */
/* A token of epoch e can still come to a collector as long as an event of e, or of an earlier epoch, is outstanding
   anywhere: a token on its way to a node, or an input that may give one. Each rank counts the events that it begins and
   ends, for each node and epoch, and sends the changes to all others after it has fired what was ready. Changes by one
   event travel together, so what an event causes is never known later than its end; a count that is negative (the end
   of a token came before the news of its beginning) does not hide a positive one at another node. The frontier is the
   first epoch with a positive count. Naiad also tells iterations apart; here collectors stand outside of loops. */

static int flow_frontier(const flow *f)
{
    for (int e = 0; e < FLOW_EPOCHS; e++)
        for (int i = 0; i < f->count; i++)
            if (f->events[i * FLOW_EPOCHS + e] > 0) return e;
    return FLOW_EPOCHS;
}

/* Feeds the next tensor of one input, or ends the input. */
static void flow_feed_one(flow *f, int id)
{
    flow_node   *n   = &f->node[id];
    flow_tensor *t   = flow_tensor_create(f, n);
    flow_tag     tag = { n->epoch, id + FLOW_NODES * (int32_t)n->fired, 0 };
    const int    was = n->epoch;
    if (!t) return;
    if (!n->feed(n->user, &tag, t->x)) {
        n->epoch = -1;
        flow_event(f, id, was, -1);
        flow_drop(f, t);
        return;
    }
    if (tag.epoch < was || tag.epoch >= FLOW_EPOCHS) {
        hpml_ctx_fail(f->ctx, HPML_ERR_ARGUMENT, "input \"%s\": epoch %d after epoch %d, of %d", n->name,
                      (int)tag.epoch, was, FLOW_EPOCHS);
        return;
    }
    n->epoch = tag.epoch;
    flow_event(f, id, tag.epoch, 1); /* nothing if the epoch is as before */
    flow_event(f, id, was, -1);
    n->fired++;
    flow_emit(f, id, tag, t);
}

static void flow_send_news(flow *f)
{
    const flow_header header = { { 0, 0, 0 }, FLOW_ALIVE };
    bool              any    = false;
    for (int i = 0; i < FLOW_NODES * FLOW_EPOCHS; i++) any = any || f->news[i] != 0;
    for (int r = 0; r < f->ranks && any; r++)
        if (r != f->rank) flow_post(f, r, FLOW_TAG_PROGRESS, header, f->news, sizeof f->news);
    memset(f->news, 0, sizeof f->news);
}

/* Delivers the epochs before the frontier, of which no more tokens can come. */
static void flow_deliver_complete(flow *f, int frontier)
{
    for (; f->delivered < frontier; f->delivered++)
        for (int i = 0; i < f->made; i++) {
            const flow_node *n = &f->node[i];
            const int        e = f->delivered;
            if (n->needed && n->kind == FLOW_COLLECT && n->rank == f->rank && n->tokens[e] > 0)
                n->deliver(n->user, e, n->kept + e * n->rows * n->cols, n->tokens[e]);
        }
}

/* Ends all channels to other ranks, and waits until theirs to this rank are at their end. */
static void flow_end(flow *f)
{
    const flow_header header = { { 0, 0, 0 }, FLOW_END };
    for (int i = 0; i < f->count; i++)
        if (f->node[i].kind == FLOW_SEND && f->node[i].rank == f->rank)
            flow_post(f, f->node[i].peer, f->node[i].pair, header, NULL, flow_bytes(&f->node[i]));
    for (int r = 0; r < f->ranks; r++)
        if (r != f->rank) flow_post(f, r, FLOW_TAG_PROGRESS, header, NULL, sizeof f->news);
    while (flow_channels_open(f) > 0 && flow_take(f, -1)) continue;
}

static hpml_status flow_stream_begin(flow *f, const int *fetch, int count)
{
    hpml_status status = flow_plan(f, fetch, count);
    f->streaming = true;
    f->delivered = 0;
    memset(f->events, 0, sizeof f->events);
    memset(f->news, 0, sizeof f->news);
    for (int i = 0; i < f->count && status == HPML_OK; i++) {
        flow_node *n = &f->node[i];
        if (n->needed && (n->kind == FLOW_CONSTANT || n->kind == FLOW_VARIABLE))
            return hpml_ctx_fail(f->ctx, HPML_ERR_ARGUMENT, "node \"%s\": streams begin at inputs", n->name);
        n->epoch = 0;
        if (n->needed && n->kind == FLOW_INPUT) f->events[i * FLOW_EPOCHS] = 1; /* known to all ranks */
        if (n->kind != FLOW_COLLECT) continue;
        memset(n->kept, 0, FLOW_EPOCHS * flow_bytes(n));
        memset(n->tokens, 0, sizeof n->tokens);
    }
    return status == HPML_OK ? flow_open(f) : status;
}

/* Runs inputs to their end and gives the collectors `fetch` what comes of each epoch. Collective. */
static inline hpml_status flow_stream(flow *f, const int *fetch, int count)
{
    if (!f) return HPML_ERR_ARGUMENT;
    hpml_status status = flow_stream_begin(f, fetch, count);
    while (status == HPML_OK) {
        bool fed = false;
        for (int i = 0; i < f->made; i++) {
            if (f->node[i].kind != FLOW_INPUT || !f->node[i].needed) continue;
            if (f->node[i].rank != f->rank || f->node[i].epoch < 0) continue;
            flow_feed_one(f, i);
            fed = true;
        }
        while (f->ready && hpml_ctx_status(f->ctx) == HPML_OK) flow_fire(f);
        flow_send_news(f);
        const int frontier = flow_frontier(f);
        flow_deliver_complete(f, frontier);
        if (frontier == FLOW_EPOCHS) break;
        for (double patience = fed ? 0 : -1; flow_take(f, patience);) patience = 0;
        flow_sweep(f, false);
        status = hpml_ctx_status(f->ctx);
    }
    if (status == HPML_OK) flow_end(f);
    flow_close(f);
    return hpml_ctx_status(f->ctx);
}

#endif
