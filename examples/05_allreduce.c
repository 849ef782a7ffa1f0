/* What you learn: the ways to add up and to exchange numbers over many workers, and what each costs. Difficulty 2 of 4.
   cc -O2 examples/05_allreduce.c -o allreduce -lm -lpthread && ./allreduce --ranks 4
   mpicc -O2 -DHPML_USE_MPI examples/05_allreduce.c -o allreduce_mpi -lm -lpthread && mpiexec -n 4 ./allreduce_mpi
   The same program runs serial, on threads or on processes, as HPML_RUN (HPML_RUN=fork:4 ./allreduce) or one literal
   in main says: serial, threads:4, fork:4, mpi.
   options, as those of nccl-tests: -b BYTES, -e BYTES (--max; K, M, G), -f FACTOR: sizes from, to, and from one to the
   next; -n TIMES, -w TIMES: calls that are timed, and before (without -n the best of five stretches of 20 ms); --op
   NAME: one of the collectives, or all; --algorithm NAME of allreduce; --ranks N (threads); --json; --draw FILE: draws
   the messages of one allreduce of 64 KB on 1 Gbit/s, in virtual time, as SVG and here:
       rank   0  >..........3>..........3>..........3
   prints a table in the style of nccl-tests, a block for each algorithm:
       algorithm       size (B)     count    time (us) algbw (GB/s) busbw (GB/s) check
       ring             1048576    262144        163.1        6.430        9.640    ok
   algbw is size / time; size: bytes of the whole array on one rank. busbw is what a rank must send at least in this
   time, algbw * 2 (p-1) / p for allreduce: compare it with the link's. */
#define HPML_IMPLEMENTATION
#include "../hpml_comm.h"
#include "collectives.h"
#include "options.h"
#include "spacetime.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct options {
    hpml_algorithm only;     /* AUTO: all */
    const char    *op;       /* one collective, or "all" */
    int64_t        ranks, min, max, factor, times, warm;
    int            json;
    const char    *draw;     /* NULL: measures */
} options;

/* The slowest rank's time counts. */
static double slowest(hpml_comm *comm, double seconds)
{
    hpml_allreduce_desc d = { .reduce = HPML_MAX, .element = HPML_ELEMENT_F64 };
    hpml_allreduce(comm, &seconds, 1, &d);
    return seconds;
}

/* Elements that are wrong, on all ranks together. */
static double wrong_elements(const collective *k, hpml_comm *comm, float *x, float *y, int64_t n,
                             hpml_algorithm a)
{
    hpml_allreduce_desc total = { .element = HPML_ELEMENT_F64 };
    double              wrong = 0;
    for (int64_t i = 0; i < n; i++) x[i] = number(hpml_comm_rank(comm), i);
    k->call(comm, x, y, n, a);
    for (int64_t i = 0; i < n; i++) wrong += !is_right(k, comm, x, y, n, i);
    hpml_allreduce(comm, &wrong, 1, &total);
    return wrong;
}

/* Seconds of one call: of -n calls after -w others, or the best of five stretches of about 20 ms. */
static double time_one(const options *o, const collective *k, hpml_comm *comm, float *x, float *y, int64_t n,
                       hpml_algorithm a)
{
    double best = 1e30;
    int    times = o->times > 0 ? (int)o->warm : 1;
    for (int run = 0; run < (o->times > 0 ? 2 : 6); run++) {
        hpml_barrier(comm);
        double start = hpml_now();
        for (int i = 0; i < times; i++) k->call(comm, x, y, n, a);
        double seconds = slowest(comm, (hpml_now() - start) / (times > 0 ? times : 1)); /* the same on all ranks */
        if (run > 0 && seconds < best) best = seconds;
        if (o->times > 0) times = (int)o->times;
        else if (seconds > 0.02) times = 1;
        else times = seconds > 2e-5 ? (int)(0.02 / seconds) : 1000;
    }
    return best;
}

static void print_line(const options *o, const collective *k, hpml_comm *comm, hpml_algorithm a, int64_t n,
                       double seconds, double wrong)
{
    const char *name = k->gives == SUM ? hpml_algorithm_name(a) : k->name;
    int         p     = hpml_comm_size(comm);
    double      bytes = 4.0 * (double)n, algbw = bytes / seconds / 1e9, busbw = algbw;
    if (k->factor > 0) busbw *= (double)k->factor * (p - 1) / p;
    if (o->json)
        printf("{\"transport\": \"%s\", \"ranks\": %d, \"collective\": \"%s\", \"algorithm\": \"%s\", "
               "\"bytes\": %.0f, \"us\": %.2f, \"algbw\": %.4f, \"busbw\": %.4f, \"wrong\": %.0f}\n",
               hpml_comm_transport(comm), p, k->name, hpml_algorithm_name(a), bytes, seconds * 1e6, algbw, busbw,
               wrong);
    else
        printf("%-14s %9.0f %9lld %12.1f %12.3f %12.3f %5s\n", name, bytes, (long long)n, seconds * 1e6, algbw, busbw,
               wrong > 0 ? "WRONG" : "ok");
    fflush(stdout);
}

/* All sizes of one collective; returns the wrong elements. x, y: (o->max bytes) each. */
static double measure(const options *o, const collective *k, hpml_comm *comm, float *x, float *y,
                      hpml_algorithm a)
{
    double lost = 0;
    for (int64_t n = o->min / 4; 4 * n <= o->max && hpml_ctx_status(hpml_comm_ctx(comm)) == HPML_OK; n *= o->factor) {
        if (k->apart && n < hpml_comm_size(comm)) continue; /* its blocks are n / p elements */
        double wrong = wrong_elements(k, comm, x, y, n, a);
        memset(x, 0, (size_t)n * sizeof *x);
        double seconds = time_one(o, k, comm, x, y, n, a);
        lost += wrong;
        if (hpml_comm_rank(comm) == 0) print_line(o, k, comm, a, n, seconds, wrong);
    }
    return lost;
}

static hpml_status rank_main(hpml_comm *comm, void *user)
{
    const options *o    = (const options *)user;
    hpml_ctx      *ctx  = hpml_comm_ctx(comm);
    bool           mpi  = strcmp(hpml_comm_transport(comm), "mpi") == 0;
    float         *x    = (float *)hpml_ctx_alloc(ctx, (size_t)o->max, NULL);
    float         *y    = (float *)hpml_ctx_alloc(ctx, (size_t)o->max, NULL);
    double         lost = 0;

    hpml_comm_tune(comm); /* measures the links, so that "auto" chooses well */
    if (hpml_comm_rank(comm) == 0 && !o->json) {
        printf("# %d ranks, transport %s, float sum\n", hpml_comm_size(comm), hpml_comm_transport(comm));
        printf("%-14s %9s %9s %12s %12s %12s %5s\n", "algorithm", "size (B)", "count", "time (us)", "algbw (GB/s)",
               "busbw (GB/s)", "check");
    }
    for (size_t i = 0; i < sizeof collectives / sizeof *collectives; i++) {
        const collective *k = &collectives[i];
        if (strcmp(o->op, "all") != 0 && strcmp(o->op, k->name) != 0) continue;
        for (int a = HPML_AUTO; a < (k->gives == SUM ? HPML_ALGORITHM_COUNT : 1); a++) {
            if (o->only != HPML_AUTO && a != (int)o->only) continue;
            if (a == HPML_NATIVE && !mpi) continue; /* only MPI has one of its own */
            lost += measure(o, k, comm, x, y, (hpml_algorithm)a);
        }
    }
    if (lost > 0) hpml_ctx_fail(ctx, HPML_ERR_STATE, "%.0f elements were wrong", lost);
    return hpml_ctx_status(ctx);
}

static hpml_status one_allreduce(hpml_comm *comm, void *user)
{
    const hpml_algorithm only = ((const options *)user)->only;
    hpml_allreduce_desc  d    = { .algorithm = only == HPML_AUTO ? HPML_RING : only };
    float                x[16384] = { 0 };
    return hpml_allreduce(comm, x, 16384, &d);
}

/* Logs the messages of one allreduce in virtual time, on a network of 1 Gbit/s, and draws them. */
static int draw(options *o, char *error, size_t size)
{
    static hpml_message_record records[20000];
    hpml_message_log           log  = { records, sizeof records / sizeof *records, 0 };
    hpml_launch_desc           desc = { .transport = HPML_TRANSPORT_CLOCK, .log = &log,
                                        .network = { .inside = { 20e-6, 125e6 } } };
    desc.ranks = o->ranks > 0 ? (int32_t)o->ranks : 4;
    if (hpml_launch(&desc, one_allreduce, o, error, size) != HPML_OK) return fprintf(stderr, "%s\n", error), 1;
    spacetime_text(stdout, &log, 79);
    if (spacetime_svg(o->draw, hpml_algorithm_name(o->only == HPML_AUTO ? HPML_RING : o->only), &log) == 0) return 0;
    return fprintf(stderr, "%s cannot be written, or there was no message\n", o->draw), 1;
}

int main(int argc, char **argv)
{
    options          o    = { .only = HPML_AUTO, .op = "allreduce", .min = 4, .max = (int64_t)256 << 20, .factor = 4,
                              .warm = 5 };
    /* mpiexec's or srun's processes, else as many threads as cores; HPML_RUN goes first */
    hpml_launch_desc desc = { .run = "auto" };
    const char      *only = "auto";
    char             names[256] = "", ops[256] = "all", error[768];
    for (int a = 0; a < HPML_ALGORITHM_COUNT; a++) {
        if (a > 0) strcat(names, "|");
        strcat(names, hpml_algorithm_name((hpml_algorithm)a));
    }
    for (size_t i = 0; i < sizeof collectives / sizeof *collectives; i++) strcat(strcat(ops, "|"), collectives[i].name);
    const option table[] = {
        { "--op", OPTION_CHOICE, &o.op, ops, "the collective (allreduce)" },
        { "--algorithm", OPTION_CHOICE, &only, names, "of allreduce, this one alone (all)" },
        { "--ranks", OPTION_COUNT, &o.ranks, "N", "threads to run on (as many as cores)" },
        { "-b", OPTION_BYTES, &o.min, "BYTES", "the smallest size, as 4096, 64K (4)" },
        { "-e", OPTION_BYTES, &o.max, "BYTES", "the largest size (256M)" },
        { "--max", OPTION_BYTES, &o.max, "BYTES", "the same as -e" },
        { "-f", OPTION_COUNT, &o.factor, "N", "from one size to the next: times N (4)" },
        { "-n", OPTION_COUNT, &o.times, "N", "calls that are timed (5 stretches of 20 ms)" },
        { "-w", OPTION_COUNT, &o.warm, "N", "with -n: calls before (5)" },
        { "--json", OPTION_FLAG, &o.json, NULL, "a JSON object for each row" },
        { "--draw", OPTION_TEXT, &o.draw, "FILE", "draws one allreduce (ring) as SVG and as text" } };
    int failed = options_read("Times collectives at every size, allreduce by every algorithm.", table,
                              sizeof table / sizeof *table, argc, argv);
    if (failed) return failed == 1 ? 0 : failed;
    if (o.min < 4 || o.max < o.min || o.factor < 2 || o.ranks > 65536)
        return fprintf(stderr, "-b: at least 4; -e: at least -b; -f: at least 2; --ranks: at most 65536\n"), 2;
    o.only = hpml_algorithm_find(only);
    if (o.draw) return draw(&o, error, sizeof error);
    if (o.ranks > 0) desc.run = NULL, desc.ranks = (int32_t)o.ranks;
    if (hpml_launch(&desc, rank_main, &o, error, sizeof error) == HPML_OK) return 0;
    fprintf(stderr, "%s\n", error);
    return 1;
}
