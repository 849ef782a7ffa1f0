/* What you learn: how a dataflow runtime such as TensorFlow's executes a graph on several ranks. Difficulty 3 of 4.
   cc -O2 examples/32_graph.c -o graph -lm -lpthread && ./graph            (or ./graph NODE, as ./graph add2)
   mpicc -O2 -DHPML_USE_MPI examples/32_graph.c -o graph -lm -lpthread && HPML_RUN=mpi mpiexec -n 2 ./graph
   Recording a node computes nothing. A run computes what it fetches, and only what that needs; nodes are placed on
   ranks, and each tensor that another rank needs is sent once. The runtime is examples/dataflow.h; here it runs
     1 a graph of four constants and four ops, of which some are never executed      (TensorFlow, Abadi et al. 2016)
     2 S += W X + b, with the variables on a server and the product on a worker      (TensorFlow)
     3 maps that follow each other: five passes over an array; fused, one            (FlumeJava, Chambers et al. 2010)
     4 a branch that depends on data, whose other side does not run                  (CIEL, Murray et al. 2011)
     5 a loop in a stream of epochs; each is delivered when no more of it can come   (Naiad, Murray et al. 2013)
   prints   output = 9; executed: a b c add1 mul1 output   and so on; exit 1 with a sentence if a part is wrong.
   HPML_RUN=serial, threads:4 or clock:2 chooses the ranks. */
#define HPML_IMPLEMENTATION
#include "../hpml_comm.h"
#include "dataflow.h"
#include <math.h>
#include <stdarg.h>
#include <stdio.h>

enum { SIZE = 8, STEPS = 5, LONG = 100000, MAPS = 5, EPOCHS = 4, RECORDS = 6, ITERATIONS = 3 };

/* Prints a line on rank 0; an error with this line if it is not right. */
static hpml_status say(flow *f, bool right, const char *format, ...)
{
    char    line[200];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    if (f->rank == 0) printf("%s\n", line);
    return right ? HPML_OK : hpml_ctx_fail(f->ctx, HPML_ERR_STATE, "this is not as it should be: %s", line);
}

/* Messages that all ranks have sent since the last call. */
static int messages(flow *f)
{
    const hpml_allreduce_desc sum = { .element = HPML_ELEMENT_I64 };
    hpml_counters             k;
    hpml_comm_counters(f->c, &k);
    hpml_allreduce(f->c, &k.messages, 1, &sum);
    hpml_comm_counters_reset(f->c);
    return (int)k.messages;
}

/* ---- 1: prune to what is asked for, place nodes, cut edges ---- */

static const struct row { const char *name, *executed; float value; int tensors; } EXPECTED[] = {
    { "a", " a", 1, 0 }, { "b", " b", 2, 0 }, { "c", " c", 3, 0 }, { "d", " d", 4, 0 }, /* tensors: sent */
    { "add1", " a b add1", 3, 2 }, { "mul1", " b c mul1", 6, 2 }, { "add2", " c d add2", 7, 2 },
    { "output", " a b c add1 mul1 output", 9, 5 } };
enum { NAMES = sizeof EXPECTED / sizeof EXPECTED[0] };

/* Constants and the output on rank 0, the other ops on rank 1. b crosses once, though two ops on rank 1 read b. */
static hpml_status constants(hpml_comm *c, const struct row *expected)
{
    flow     *f    = flow_create(c);
    const int a    = flow_constant(f, "a", 0, 1), b = flow_constant(f, "b", 0, 2);
    const int c3   = flow_constant(f, "c", 0, 3), d = flow_constant(f, "d", 0, 4);
    const int add1 = flow_pair(f, FLOW_ADD, "add1", 1, a, b), mul1 = flow_pair(f, FLOW_MULTIPLY, "mul1", 1, b, c3);
    flow_pair(f, FLOW_ADD, "add2", 1, c3, d);
    if (flow_pair(f, FLOW_ADD, "output", 0, add1, mul1) < 0) return hpml_ctx_status(hpml_comm_ctx(c));
    const int fetch = flow_find(f, expected->name), tensors = f->ranks > 1 ? expected->tensors : 0;
    messages(f);
    if (flow_run(f, &fetch, 1) != HPML_OK) return hpml_ctx_status(f->ctx);
    const int   sent  = messages(f);
    const float value = flow_fetched(f, fetch);
    char        executed[80] = "";
    for (int i = 0; i < NAMES; i++)
        if (flow_fired(f, i) > 0) snprintf(executed + strlen(executed), 12, " %s", f->node[i].name);
    return say(f, value == expected->value && strcmp(executed, expected->executed) == 0 && f->pairs == tensors &&
               sent == tensors, "%s = %g; executed:%s; %d tensors sent in %d messages", expected->name,
               (double)value, executed, f->pairs, sent);
}

/* ---- 2: variables on a server ---- */

/* Small whole numbers, whose sums are exact in any order. */
static float x_at(int step, int i) { return (float)((step * 5 + i * 3) % 7 - 3); }
static float w_at(int i, int j) { return (float)((i * 3 + j * 5) % 9 - 4); }

static bool feed_x(void *user, flow_tag *tag, float *x)
{
    const int step = (*(int *)user)++;
    (void)tag;
    for (int i = 0; i < SIZE; i++) x[i] = x_at(step, i);
    return true;
}

static hpml_status server_and_worker(hpml_comm *c)
{
    float weights[SIZE * SIZE], bias[SIZE], serial[SIZE] = { 0 }, apart = 0;
    int   step = 0;
    for (int i = 0; i < SIZE * SIZE; i++) weights[i] = w_at(i / SIZE, i % SIZE);
    for (int i = 0; i < SIZE; i++) bias[i] = (float)i;
    flow     *f  = flow_create(c);
    const int w  = flow_source(f, FLOW_VARIABLE, "W", 0, SIZE, SIZE, weights);
    const int b  = flow_source(f, FLOW_VARIABLE, "b", 0, SIZE, 1, bias);
    const int s  = flow_source(f, FLOW_VARIABLE, "S", 0, SIZE, 1, NULL);
    const int x  = flow_input(f, "X", 1, SIZE, 1, feed_x, &step);
    const int y  = flow_pair(f, FLOW_ADD, "WX + b", 1, flow_matmul(f, "WX", 1, w, x), b);
    const int up = flow_assign_add(f, "S += WX + b", s, y);
    if (up < 0) return hpml_ctx_status(hpml_comm_ctx(c));
    messages(f);
    for (int run = 0; run < STEPS; run++) {
        if (flow_run(f, &up, 1) != HPML_OK) return hpml_ctx_status(f->ctx);
        for (int i = 0; i < SIZE; i++) {
            for (int j = 0; j < SIZE; j++) serial[i] += w_at(i, j) * x_at(run, j);
            serial[i] += bias[i];
        }
    }
    const int sent = messages(f), expected = f->ranks > 1 ? 3 * STEPS : 0; /* W, b, WX + b */
    for (int i = 0; i < SIZE && f->rank == 0; i++) apart = fmaxf(apart, fabsf(f->node[s].kept[i] - serial[i]));
    return say(f, apart == 0 && sent == expected,
               "S += WX + b: after %d steps S is %g off a serial loop's; %d messages", STEPS, (double)apart,
               sent);
}

/* ---- 3: lazy fusion ---- */

static float times(float x) { return 1.01f * x; }
static float plus(float x) { return x + 0.25f; }
static float positive(float x) { return x > 0; }

static bool feed_long(void *user, flow_tag *tag, float *x)
{
    (void)user, (void)tag;
    for (int i = 0; i < LONG; i++) x[i] = 1e-3f * (float)i;
    return true;
}

static hpml_status fusion(hpml_comm *c)
{
    const size_t bytes = sizeof(float) * LONG;
    flow        *f     = flow_create(c);
    float       *plain = (float *)hpml_ctx_alloc(hpml_comm_ctx(c), bytes, NULL);
    int          id    = flow_input(f, "x", 0, LONG, 1, feed_long, NULL);
    for (int i = 0; i < MAPS; i++) id = flow_map(f, "map", 0, id, i % 2 ? plus : times);
    if (!plain || flow_run(f, &id, 1) != HPML_OK) return hpml_ctx_status(hpml_comm_ctx(c));
    if (f->rank == 0) memcpy(plain, flow_result(f, id), bytes);
    const int passes = (int)f->passes;
    f->fuse = true;
    if (flow_run(f, &id, 1) != HPML_OK || f->rank > 0) return hpml_ctx_status(f->ctx);
    const bool equal = memcmp(plain, flow_result(f, id), bytes) == 0;
    const int  fused = (int)f->passes - passes;
    return say(f, equal && passes == MAPS && fused == 1, "%d maps over %d floats: %d passes; fused %d, %s bits", MAPS,
               LONG, passes, fused, equal ? "the same" : "other");
}

/* ---- 4: a branch that depends on data ---- */

static hpml_status branch(hpml_comm *c)
{
    int       step = 0, held = 0, wrong = 0;
    flow     *f    = flow_create(c);
    const int x    = flow_input(f, "x", 0, SIZE, 1, feed_x, &step);
    const int when = flow_map(f, "sum > 0", 0, flow_sum(f, "sum", 0, x), positive);
    const int yes  = flow_map(f, "yes", 1, flow_gate(f, "if", 1, x, when, 1), times);
    const int no   = flow_map(f, "no", 0, flow_gate(f, "else", 0, x, when, 0), plus);
    const int y    = flow_pair(f, FLOW_MERGE, "y", 0, yes, no);
    for (int run = 0; run < STEPS; run++) {
        float sum = 0, first = x_at(run, 0);
        for (int i = 0; i < SIZE; i++) sum += x_at(run, i);
        held += sum > 0;
        if (flow_run(f, &y, 1) != HPML_OK) return hpml_ctx_status(hpml_comm_ctx(c));
        wrong += flow_fetched(f, y) != (sum > 0 ? times(first) : plus(first));
    }
    const int ran_yes = (int)flow_fired(f, yes), ran_no = (int)flow_fired(f, no);
    return say(f, wrong == 0 && ran_yes == held && ran_no == STEPS - held,
               "branch: condition held in %d of %d runs; yes ran %d times, no %d; %d wrong results", held,
               STEPS, ran_yes, ran_no, wrong);
}

/* ---- 5: a loop in a stream of epochs ---- */

typedef struct source { hpml_comm *c; int number, at; double seconds; } source; /* seconds: for each record */
typedef struct sink { flow *f; int next, wrong; float sum[EPOCHS]; } sink; /* sum: a serial loop's */

static float record(int number, int at) { return (float)(100 * number + at); }
static float body(float x) { return 2 * x + 1; }
static bool feed_record(void *user, flow_tag *tag, float *x)
{
    source *s = (source *)user;
    if (s->at == EPOCHS * RECORDS) return false;
    if (s->seconds > 0) hpml_comm_compute(s->c, s->seconds);
    tag->epoch = s->at / RECORDS;
    x[0]       = record(s->number, s->at++);
    return true;
}

static void deliver(void *user, int epoch, const float *sum, int tokens)
{
    sink      *s     = (sink *)user;
    const int *there = s->f->node[flow_find(s->f, "collect")].tokens;
    int        later = 0;
    for (int e = epoch + 1; e < EPOCHS; e++) later += there[e];
    printf("epoch %d: sum %g of %d records; %d of later epochs were there\n", epoch, (double)*sum, tokens, later);
    s->wrong += epoch != s->next++ || tokens != 2 * RECORDS || *sum != s->sum[epoch];
}

static hpml_status loop(hpml_comm *c)
{
    source fast = { c, 0, 0, 0 }, slow = { c, 1, 0, 2e-3 };
    flow  *f = flow_create(c);
    sink   s = { .f = f };
    for (int i = 0; i < 2 * EPOCHS * RECORDS; i++) {
        float x = record(i % 2, i / 2);
        for (int k = 0; k < ITERATIONS; k++) x = body(x);
        s.sum[i / 2 / RECORDS] += x;
    }
    const int in0  = flow_input(f, "fast", 0, 1, 1, feed_record, &fast);
    const int in1  = flow_input(f, "slow", 1, 1, 1, feed_record, &slow);
    const int head = flow_record(f, FLOW_UNION, "head", 1, flow_pair(f, FLOW_UNION, "both", 1, in0, in1), FLOW_NONE);
    const int more = flow_fewer(f, "iteration < 3", 1, head, ITERATIONS);
    const int y    = flow_map(f, "2 x + 1", 0, flow_gate(f, "again", 1, head, more, 1), body);
    flow_next(f, "next", 0, head, y);
    const int out = flow_record(f, FLOW_EXIT, "exit", 1, flow_gate(f, "done", 1, head, more, 0), FLOW_NONE);
    const int end = flow_collect(f, "collect", 0, out, deliver, &s);
    if (flow_stream(f, &end, 1) != HPML_OK) return hpml_ctx_status(hpml_comm_ctx(c));
    const int ran = (int)flow_fired(f, y), all = 2 * EPOCHS * RECORDS;
    if (f->rank > 0) return HPML_OK;
    return say(f, ran == ITERATIONS * all && s.next == EPOCHS && s.wrong == 0,
               "%d records, %d iterations in all; %d epochs delivered, %d of them wrong", all, ran, s.next, s.wrong);
}

static hpml_status rank_main(hpml_comm *c, void *user)
{
    const struct row *asked  = (const struct row *)user;
    hpml_status       status = constants(c, asked ? asked : &EXPECTED[NAMES - 1]);
    if (asked) return status;
    if (status == HPML_OK) status = server_and_worker(c);
    if (status == HPML_OK) status = fusion(c);
    if (status == HPML_OK) status = branch(c);
    return status == HPML_OK ? loop(c) : status;
}

int main(int argc, char **argv)
{
    char       error[512] = "";
    struct row asked      = { 0 };
    int        me         = 0;
    for (int i = 0; i < NAMES && argc == 2; i++)
        if (strcmp(EXPECTED[i].name, argv[1]) == 0) asked = EXPECTED[i];
    if (argc > 1 && !asked.name)
        return fprintf(stderr, "usage: graph [NODE]; NODE is one of a b c d add1 mul1 add2 output\n"), 2;
    const hpml_launch_desc l = { .run = hpml_launched(&me) > 1 ? "mpi" : "threads:2", .ctx.threads = 1 };
    if (hpml_launch(&l, rank_main, asked.name ? &asked : NULL, error, sizeof error) == HPML_OK) return 0;
    fprintf(stderr, "%s\n", error);
    return 1;
}
