/* A solution of examples/exercises/14_pipeline. */
#include "../../examples/exercises/14_pipeline/check.h"

bool pipe_move(int stages, int micro, int stage, int k, pipe_step *move)
{
    int forwards = 0, backwards = 0;
    for (int i = 0; i <= k && backwards < micro; i++) {
        move->forward = forwards < micro && forwards - backwards < stages - stage;
        if (move->forward) move->micro = forwards++;
        else move->micro = backwards++;
    }
    return k < 2 * micro;
}
