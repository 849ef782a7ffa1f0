/* Exercise: the order in which a stage of a pipeline works, 1F1B. Difficulty 2 of 4. The task is in README.md.
   cc start.c -o exercise && ./exercise */
#include "check.h"

/* Sets *move to the pass that stage `stage` of `stages` does as its move number k, with `micro` micro-batches; false:
   the stage has done all. As given here: GPipe's order, whose time is right and whose memory is not. */
bool pipe_move(int stages, int micro, int stage, int k, pipe_step *move)
{
    (void)stages;
    (void)stage;
    move->forward = k < micro;
    move->micro   = k % micro;
    return k < 2 * micro;
}
