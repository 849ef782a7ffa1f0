/* Checks in functions that a rank runs. */
#ifndef HPML_CHECK_H
#define HPML_CHECK_H

#include <stdio.h>

/* Inside a function that a rank runs: returns from the function with an error if the condition does not hold. */
#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) return check_failed(c, __FILE__, __LINE__, #condition);                                      \
    } while (0)

static hpml_status check_failed(hpml_comm *c, const char *file, int line, const char *text)
{
    hpml_ctx *ctx = hpml_comm_ctx(c);
    if (hpml_ctx_status(ctx) != HPML_OK) {
        printf("    %s:%d: %s: %s\n", file, line, text, hpml_ctx_error(ctx));
        return hpml_ctx_status(ctx);
    }
    printf("    %s:%d: %s on rank %d of %d, %s\n", file, line, text, hpml_comm_rank(c), hpml_comm_size(c),
           hpml_comm_transport(c));
    return hpml_ctx_fail(ctx, HPML_ERR_STATE, "%s:%d: %s", file, line, text);
}

#endif
