/* Exercise 24: the scheduler of a cluster. The task is in README.md; `ninja ex24` builds and checks your copy,
   mine.c. */
#include "check.h"

/* Where: sets take[i] to the GPUs that a job of `gpus` GPUs gets from node i, which has free[i]; false: not enough. */
bool sched_place(int gpus, const int *free, int nodes, int *take)
{
    /* >> place */
    int total = 0;
    for (int i = 0; i < nodes; i++) {
        take[i] = 0;
        total += free[i];
    }
    if (total < gpus) return false;
    while (gpus > 0) {
        int best = -1, most = -1;
        for (int i = 0; i < nodes; i++) {
            const int left = free[i] - take[i];
            if (most < 0 || left > free[most] - take[most]) most = i;
            if (left >= gpus && (best < 0 || left < free[best] - take[best])) best = i;
        }
        if (best < 0) best = most;
        const int left = free[best] - take[best];
        const int taken = left < gpus ? left : gpus;
        take[best] += taken;
        gpus -= taken;
    }
    return true;
    /* << HPML_TODO("the nodes of a job"); */
}

/* When: returns the number of the waiting job that starts now; -1: none. */
int sched_next(const sched_job *queue, int count, const sched_running *running, int running_count, int free)
{
    /* >> next */
    if (count == 0) return -1;
    if (queue[0].gpus <= free) return 0;
    double promise = 0;
    int    then = free; /* GPUs that are free at the time `promise` */
    while (then < queue[0].gpus) {
        double next = 1e300;
        for (int i = 0; i < running_count; i++)
            if (running[i].end > promise && running[i].end < next) next = running[i].end;
        promise = next;
        then    = free;
        for (int i = 0; i < running_count; i++)
            if (running[i].end <= promise) then += running[i].gpus;
    }
    const int spare = then - queue[0].gpus;
    for (int i = 1; i < count; i++) {
        if (queue[i].gpus > free) continue;
        if (queue[i].seconds <= promise || queue[i].gpus <= spare) return i;
    }
    return -1;
    /* << HPML_TODO("the job that starts next"); */
}
