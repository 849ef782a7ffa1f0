/* For the programs of the tour: SHOW prints a line of code and says if it holds, and the program ends with status 1 if
   one did not. The context's error, if there is one, is printed at the end. */
#ifndef HPML_TOUR_H
#define HPML_TOUR_H

#include <stdio.h>

static int tour_wrong;

#define SHOW(condition)                                                 \
    do {                                                                \
        int tour_holds = (condition) ? 1 : 0;                           \
        printf("%s  %s\n", tour_holds ? "     " : "WRONG", #condition); \
        fflush(stdout);                                                 \
        tour_wrong |= !tour_holds;                                      \
    } while (0)

static inline int tour_end(hpml_ctx *ctx)
{
    if (hpml_ctx_status(ctx) != HPML_OK) printf("error: %s\n", hpml_ctx_error(ctx));
    tour_wrong |= hpml_ctx_status(ctx) != HPML_OK;
    hpml_ctx_free(ctx);
    return tour_wrong;
}

#endif
