/* Exercise 17: the order 1F1B of a pipeline. The task is in README.md; `ninja ex17` builds and checks your copy,
   mine.c. */
#include "check.h"

bool pipe_move(int stages, int micro, int stage, int k, pipe_step *move)
{
    HPML_TODO("the order 1F1B");
}
