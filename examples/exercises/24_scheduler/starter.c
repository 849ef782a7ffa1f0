/* Exercise 24: the scheduler of a cluster. The task is in README.md; `ninja ex24` builds and checks your copy,
   mine.c. */
#include "check.h"

/* Where: sets take[i] to the GPUs that a job of `gpus` GPUs gets from node i, which has free[i]; false: not enough. */
bool sched_place(int gpus, const int *free, int nodes, int *take)
{
    HPML_TODO("the nodes of a job");
}

/* When: returns the number of the waiting job that starts now; -1: none. */
int sched_next(const sched_job *queue, int count, const sched_running *running, int running_count, int free)
{
    HPML_TODO("the job that starts next");
}
