/* Exercise 17: the order 1F1B of a pipeline. The task is in README.md; `ninja ex17` builds and checks your copy,
   mine.c. */
#include "check.h"

bool pipe_move(int stages, int micro, int stage, int k, pipe_step *move)
{
    /* >> move */
    int forwards = 0, backwards = 0;
    for (int i = 0; i <= k && backwards < micro; i++) {
        move->forward = forwards < micro && forwards - backwards < stages - stage;
        if (move->forward) move->micro = forwards++;
        else move->micro = backwards++;
    }
    return k < 2 * micro;
    /* << HPML_TODO("the order 1F1B"); */
}
