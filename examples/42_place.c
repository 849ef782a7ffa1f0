/* What you learn: how a runtime decides for each op of a graph whether the CPU or the GPU computes it, as in Dandelion
   (Rossbach et al. 2013). Difficulty 3 of 4.
   cc -O2 examples/42_place.c -o place -lm -lpthread && ./place [ROWS]
   An op takes what its roofline says (operations / peak or bytes / bandwidth, whichever is longer) and, on the GPU, the
   launch of a kernel; a tensor that the other device reads crosses PCIe once. Small ops are faster on the CPU, large
   ones on the GPU; an op on its neighbours' device saves transfers. The cheapest placement is a minimum cut (Stone
   1977): an edge between an op and a device has the op's cost on the other device, edges to its readers a transfer's.
   Two ranks in virtual time stand for the devices, with the numbers of a V100 and of a processor with 16 cores; the
   dataflow runtime (examples/dataflow.h) runs the graph as it is placed: a net of two layers with a residual.
   prints for 8 to 512 rows: microseconds with all ops on the CPU, all on the GPU, and placed; which ops are on the GPU.
   It fails unless the cut is the best of all placements, virtual time is what was predicted, the results are equal, and
   the table begins with all ops on the CPU and ends with all on the GPU. */
#define HPML_IMPLEMENTATION
#include "../hpml_comm.h"
#include "dataflow.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { CPU, GPU, DEVICES, WIDTH = 256, NODES = 11, FREE = NODES - 2, POINTS = 2 + 3 * NODES }; /* FREE: may be placed */
#define NEVER 1e3 /* seconds: more than any placement takes */

/* A device computes `flops` operations a second and moves `bandwidth` bytes a second; each op takes .launch more. */
typedef struct device { double flops, bandwidth, launch; } device;
static device    DEVICE[DEVICES];
static hpml_link PCIE; /* between the ranks CPU and GPU */

/* ---- what ops and transfers cost ---- */

static double op_seconds(const flow *f, const flow_node *n, int rank)
{
    const double out = (double)n->rows * n->cols;
    double       floats = out, operations = out;
    if (n->inputs == 0) return 0; /* x is read from a file, weights are there */
    for (int k = 0; k < n->inputs; k++)
        floats += (double)f->node[n->input[k]].rows * f->node[n->input[k]].cols;
    if (n->kind == FLOW_MATMUL) operations *= 2 * f->node[n->input[0]].cols;
    if (n->kind == FLOW_SUM) operations = floats;
    return DEVICE[rank].launch + fmax(operations / DEVICE[rank].flops, 4 * floats / DEVICE[rank].bandwidth);
}

static double node_seconds(const flow *f, const flow_node *n) { return op_seconds(f, n, n->rank); }

static double transfer_seconds(const flow_node *n) /* for the tensor that n computes, with the header of its message */
{
    return PCIE.latency + (double)(flow_bytes(n) + sizeof(flow_header)) / PCIE.bandwidth;
}

static bool reads(const flow_node *n, int id)
{
    return (n->inputs > 0 && n->input[0] == id) || (n->inputs > 1 && n->input[1] == id);
}

/* The seconds of one op after another on the ranks that the nodes have now, and of the transfers between them. */
static double placed_seconds(const flow *f)
{
    double sum = 0;
    for (int i = 0; i < f->made; i++) {
        bool crosses = false;
        for (int j = 0; j < f->made; j++)
            crosses = crosses || (reads(&f->node[j], i) && f->node[j].rank != f->node[i].rank);
        sum += node_seconds(f, &f->node[i]) + (crosses ? transfer_seconds(&f->node[i]) : 0);
    }
    return sum;
}

/* ---- the minimum cut ---- */

typedef double capacities[POINTS][POINTS]; /* [a][b]: what still fits through the edge from a to b */

/* Sets `before` of points that edges with capacity left lead to from point 0. True: point 1 is among them. */
static bool reach(capacities capacity, int points, int *before)
{
    int queue[POINTS] = { 0 }, first = 0, last = 1;
    for (int i = 0; i < points; i++) before[i] = i == 0 ? 0 : -1;
    while (first < last) {
        const int a = queue[first++];
        for (int b = 0; b < points; b++) {
            if (before[b] >= 0 || capacity[a][b] <= 0) continue;
            before[b]     = a;
            queue[last++] = b;
        }
    }
    return before[1] >= 0;
}

/* Edmonds and Karp 1972: sends as much as fits along the shortest path from source to sink, until there is none. The
   source's side of the cut is what can still be reached from it. */
static double minimum_cut(capacities capacity, int points, int *before)
{
    double flow_sum = 0;
    while (reach(capacity, points, before)) {
        double least = 1e300;
        for (int b = 1; b != 0; b = before[b]) least = fmin(least, capacity[before[b]][b]);
        for (int b = 1; b != 0; b = before[b]) {
            capacity[before[b]][b] -= least;
            capacity[b][before[b]] += least;
        }
        flow_sum += least;
    }
    return flow_sum;
}

/* Places the nodes but the first and the last one, which stay on the CPU. Returns the predicted seconds. Points: 0 the
   CPU, 1 the GPU, then the nodes, then for each its tensor's transfer to the GPU, paid once if readers are there and
   the node is not, then the transfer back. */
static double place(flow *f)
{
    capacities capacity = { { 0 } };
    int        before[POINTS];
    const int  n = f->made, points = 2 + 3 * n;
    for (int i = 0; i < n; i++) {
        const int    there = 2 + n + i, back = 2 + 2 * n + i;
        const bool   fixed = i == 0 || i == n - 1;
        const double cost = transfer_seconds(&f->node[i]);
        capacity[0][2 + i] = fixed ? NEVER : op_seconds(f, &f->node[i], GPU);
        capacity[2 + i][1] = op_seconds(f, &f->node[i], CPU);
        capacity[2 + i][there] = capacity[back][2 + i] = cost;
        for (int j = 0; j < n; j++)
            if (reads(&f->node[j], i)) capacity[there][2 + j] = capacity[2 + j][back] = NEVER;
    }
    const double seconds = minimum_cut(capacity, points, before);
    for (int i = 0; i < n; i++) f->node[i].rank = before[2 + i] >= 0 ? CPU : GPU;
    return seconds;
}

/* The least predicted seconds of all 2^FREE placements, one by one. */
static double best_of_all(flow *f)
{
    double best = 1e300;
    for (unsigned bits = 0; bits < 1u << FREE; bits++) {
        for (int i = 0; i < FREE; i++) f->node[1 + i].rank = bits >> i & 1;
        best = fmin(best, placed_seconds(f));
    }
    return best;
}

/* ---- the net, on two ranks in virtual time ---- */

static float scaled(float x) { return x / 8; }
static float positive(float x) { return x > 0 ? x : 0; }
static float mean(float x) { return x / WIDTH; }

static bool feed(void *user, flow_tag *tag, float *x)
{
    (void)tag;
    for (int i = 0; i < *(int *)user * WIDTH; i++) x[i] = (float)(i % 17 - 8);
    return true;
}

/* The net for `rows` rows (in *rows, which must outlive it): positive(x + W2 positive(W1 x)), summed up. */
static flow *net(hpml_comm *c, int *rows)
{
    float weight[WIDTH * WIDTH];
    for (int i = 0; i < WIDTH * WIDTH; i++) weight[i] = (float)(i % 7 - 3) / 64;
    flow     *f   = flow_create(c);
    const int in  = flow_input(f, "x", CPU, *rows, WIDTH, feed, rows);
    const int w1  = flow_source(f, FLOW_CONSTANT, "W1", CPU, WIDTH, WIDTH, weight);
    const int w2  = flow_source(f, FLOW_CONSTANT, "W2", CPU, WIDTH, WIDTH, weight);
    const int x   = flow_map(f, "scale", CPU, in, scaled);
    const int h   = flow_map(f, "relu1", CPU, flow_matmul(f, "matmul1", CPU, x, w1), positive);
    const int sum = flow_pair(f, FLOW_ADD, "add", CPU, x, flow_matmul(f, "matmul2", CPU, h, w2));
    const int out = flow_sum(f, "sum", CPU, flow_map(f, "relu2", CPU, sum, positive));
    return flow_map(f, "mean", CPU, out, mean) == NODES - 1 ? f : NULL;
}

/* Runs the net with its nodes on the ranks that `ranks` says. Sets *value to what it computes. Returns the seconds of
   virtual time that this takes on the CPU's rank. */
static double run(flow *f, const int32_t *ranks, float *value)
{
    const int fetch = NODES - 1;
    for (int i = 0; i < NODES; i++) f->node[i].rank = ranks[i];
    f->seconds = node_seconds;
    hpml_barrier(f->c);
    const double start = hpml_comm_now(f->c);
    flow_run(f, &fetch, 1);
    const double seconds = hpml_comm_now(f->c) - start;
    *value = flow_fetched(f, fetch);
    return seconds;
}

static bool near(double a, double b) { return fabs(a - b) <= 1e-9 * b; }

/* Prints a line of the table; returns how many of the net's ops the cut has placed on the GPU. */
static int row(hpml_comm *c, int rows, bool *right)
{
    flow   *f = net(c, &rows);
    int32_t ranks[3][NODES] = { { CPU } }; /* of all nodes on the CPU, on the GPU, placed */
    double  said[3], took[3];
    float   value[3];
    char    on[80] = "";
    int     count = 0;
    if (!f) return -1;
    for (int i = 1; i <= FREE; i++) ranks[1][i] = GPU;
    const double least = place(f);
    for (int i = 0; i < NODES; i++) ranks[2][i] = f->node[i].rank;
    for (int k = 0; k < 3; k++) {
        took[k] = run(f, ranks[k], &value[k]);
        said[k] = placed_seconds(f);
        *right  = *right && near(took[k], said[k]) && value[k] == value[0];
    }
    for (int i = 3; i <= FREE; i++) { /* after x and the weights */
        if (ranks[2][i] == CPU) continue;
        snprintf(on + strlen(on), sizeof on - strlen(on), " %s", f->node[i].name);
        count++;
    }
    if (hpml_comm_rank(c) > 0) return count;
    *right = *right && near(least, said[2]) && near(least, best_of_all(f)); /* which changes the nodes' ranks */
    printf("%4d %9.2f %9.2f %9.2f  %s\n", rows, 1e6 * took[0], 1e6 * took[1], 1e6 * took[2], count ? on + 1 : "none");
    return count;
}

static hpml_status rank_main(hpml_comm *c, void *user)
{
    const int *asked = (const int *)user, r = hpml_comm_rank(c);
    int        first = 0, last = 0;
    bool       right = true;
    hpml_ctx  *ctx = hpml_comm_ctx(c);
    if (r == 0) printf("rows   all CPU   all GPU    placed  on the GPU      (microseconds)\n");
    if (*asked > 0) row(c, *asked, &right);
    for (int rows = 8; rows <= 512 && *asked == 0; rows *= 2) {
        last = row(c, rows, &right);
        if (rows == 8) first = last;
    }
    right = right && (*asked > 0 || (first == 0 && last == FREE - 2));
    if (r > 0 || hpml_ctx_status(ctx) != HPML_OK) return hpml_ctx_status(ctx);
    if (!right) return hpml_ctx_fail(ctx, HPML_ERR_STATE, "a placement is not the best, not as predicted, or changes "
                                     "the result");
    printf("each is the best of %d placements; virtual time as predicted, equal results\n", 1 << FREE);
    return HPML_OK;
}

int main(int argc, char **argv)
{
    char                error[512] = "";
    int                 rows = argc > 1 ? atoi(argv[1]) : 0;
    const hpml_machine *gpu = hpml_machine_find("v100-pcie"), *cpu = hpml_machine_find("cpu-10gbit");
    if (argc > 2 || (argc == 2 && (rows < 1 || rows > 4096)))
        return fprintf(stderr, "usage: place [ROWS]; ROWS: 1 to 4096\n"), 2;
    DEVICE[CPU]    = (device){ cpu->flops, cpu->bandwidth, 0 };
    DEVICE[GPU]    = (device){ gpu->flops, gpu->bandwidth, 5e-6 };
    PCIE.latency   = gpu->network.inside.latency;
    PCIE.bandwidth = gpu->host;
    const hpml_launch_desc l = { .transport = HPML_TRANSPORT_CLOCK, .ranks = DEVICES, .network.inside = PCIE,
                                 .ctx.threads = 1 };
    if (hpml_launch(&l, rank_main, &rows, error, sizeof error) == HPML_OK) return 0;
    fprintf(stderr, "%s\n", error);
    return 1;
}
