/* What you learn: what packing a job onto few nodes costs and gains a cluster. Difficulty 2 of 4.
   cc -O2 examples/09_queue.c -o queue -lm -lpthread && ./queue
   20 jobs wait in line for 8 nodes of 4 GPUs; the first one that does not fit holds up all behind it.
   pack: a job takes as few nodes as it needs, or waits, so GPUs stand idle that are enough for it (stranded); its
   messages stay inside. spread: any free GPUs, from the emptiest node; nothing is stranded, but each step waits for the
   network. given: packed if that is possible now, else what is free, node by node. Step times come from the simulator,
   which gets the node of each rank (hpml_network.node).
   prints   place    all done after  mean wait  stranded GPU hours  mean efficiency   and a line for each.
   Not modelled: two jobs on one node share its card. */
#define HPML_IMPLEMENTATION
#include "../hpml_comm.h"
#include <stdio.h>
#include <stdlib.h>

enum { NODES = 8, GPUS = 4, JOBS = 20, LAYERS = 20, MOST = NODES * GPUS };
typedef enum placing { PACK, SPREAD, GIVEN } placing;
typedef struct job { double arrives, steps, ends; int ranks, on[NODES]; } job; /* on: ranks on each node */

/* Puts the ranks one by one onto the emptiest node (spread), or the fullest that has room; packing, only onto nodes
   that hold `each`. */
static int place(job *j, const int *free_gpus, placing how)
{
    int room[NODES], placed = 0, each = j->ranks < GPUS ? j->ranks : GPUS;
    for (int n = 0; n < NODES; n++) room[n] = how == PACK && free_gpus[n] < each ? 0 : free_gpus[n], j->on[n] = 0;
    for (int r = 0, best = -1; r < j->ranks; r++) {
        if (how == SPREAD || best < 0 || room[best] == 0) best = -1;
        for (int n = 0; n < NODES && (how == SPREAD || best < 0 || r == 0); n++)
            if (room[n] > 0 && (best < 0 || (how == SPREAD ? room[n] > room[best] : room[n] < room[best]))) best = n;
        if (best < 0) break;
        room[best]--, j->on[best]++, placed++;
    }
    return placed == j->ranks;
}

/* A step of this job where it is: 25 M parameters, 100 ms of computation, NVLink inside and 10 Gbit/s between nodes. */
static hpml_simulation step(const job *j)
{
    int32_t            node[MOST];
    double             backward[LAYERS];
    int64_t            elements[LAYERS];
    hpml_simulation    s;
    hpml_simulate_desc d = { .ranks = j->ranks, .layers = LAYERS, .backward_s = backward, .elements = elements,
                             .algorithm = HPML_RING,
                             .network = { .inside = { 2e-6, 150e9 }, .between = { 20e-6, 1.25e9 }, .node = node } };
    for (int i = 0; i < LAYERS; i++) backward[i] = 0.1 / LAYERS, elements[i] = 25000000 / LAYERS;
    for (int n = 0, r = 0, number = 0; n < NODES; n++) {
        for (int i = 0; i < j->on[n]; i++) node[r++] = number;
        number += j->on[n] > 0;
    }
    char why[256];
    if (hpml_simulate(&d, &s, why, sizeof why) != HPML_OK) fprintf(stderr, "%s\n", why), exit(1);
    return s;
}

static void run(placing how, const char *name)
{
    static const int sizes[8] = { 1, 2, 4, 3, 8, 6, 2, 3 };
    job              jobs[JOBS];
    int              free_gpus[NODES], next = 0, idle = MOST;
    double           now = 0, waited = 0, stranded = 0, efficiency = 0, last = 0;
    for (int n = 0; n < NODES; n++) free_gpus[n] = GPUS;
    for (int i = 0; i < JOBS; i++)
        jobs[i] = (job){ .arrives = 120. * i, .steps = 6000 + 3000 * (i * 7 % 11), .ranks = sizes[i * 5 % 8] };
    while (next < JOBS || idle < MOST) {
        bool fits = next < JOBS && jobs[next].arrives <= now &&
                    (place(&jobs[next], free_gpus, how == SPREAD ? SPREAD : PACK) ||
                     (how == GIVEN && place(&jobs[next], free_gpus, GIVEN)));
        if (fits) {
            job            *j = &jobs[next++];
            hpml_simulation s = step(j);
            j->ends = now + j->steps * s.step_s;
            waited += now - j->arrives, efficiency += s.efficiency / JOBS, idle -= j->ranks;
            for (int n = 0; n < NODES; n++) free_gpus[n] -= j->on[n];
            continue;
        }
        double then = next < JOBS && jobs[next].arrives > now ? jobs[next].arrives : 1e30; /* the next that happens */
        for (int i = 0; i < next; i++)
            if (jobs[i].ends > now && jobs[i].ends < then) then = jobs[i].ends;
        if (next < JOBS && jobs[next].arrives <= now && jobs[next].ranks <= idle) stranded += (then - now) * idle;
        last = now = then;
        for (int i = 0; i < next; i++)
            for (int n = 0; n < NODES && jobs[i].ends == now; n++) free_gpus[n] += jobs[i].on[n], idle += jobs[i].on[n];
    }
    printf("%-6s %12.2f h %8.2f h %14.2f %18.0f %%\n", name, last / 3600, waited / JOBS / 3600,
           stranded / 3600, 100 * efficiency);
}

int main(void)
{
    printf("place   all done after  mean wait  stranded GPU hours  mean efficiency\n");
    run(PACK, "pack"), run(SPREAD, "spread"), run(GIVEN, "given");
    return 0;
}
