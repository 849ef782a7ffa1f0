/* A test program: TEST(name) { ... ENSURE(condition); ENSURE_NEAR(a, b, tolerance); } and nothing else; main is here.
   Options: --filter TEXT runs the tests whose name contains it, --test NAME that one, --list names them.
   Exit: 0 passed, 1 failed, 77 all skipped. */
#ifndef HPML_TEST_H
#define HPML_TEST_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__) /* takes its time: less of the same will do */
#define SLOW_BUILD 1
#else
#define SLOW_BUILD 0
#endif

/* for (...), over the allreduce algorithms from `first` on, without the transport's own. */
#define EACH_ALGORITHM(a, first) \
    for (int a = (first); a < HPML_ALGORITHM_COUNT; a++) \
        if (a == HPML_NATIVE) continue; \
        else

typedef struct test_case {
    const char       *name;
    void            (*run)(void);
    struct test_case *next;
} test_case;

/* TEST_OUT: where what failed is told. TEST_GIVE_UP(): the first failure is the last, and this ends the program. */
#ifndef TEST_OUT
#define TEST_OUT stdout
#endif

static test_case  *test_first, **test_last = &test_first;
static int         test_failed;
static const char *test_skipped;

/* Registers itself before main. */
#define TEST(name)                                                 \
    static void name(void);                                        \
    static test_case test_case_##name = { #name, name, NULL };     \
    __attribute__((constructor)) static void test_add_##name(void) \
    {                                                              \
        *test_last = &test_case_##name;                            \
        test_last  = &test_case_##name.next;                       \
    }                                                              \
    static void name(void)

#define ENSURE(condition)                                                         \
    do {                                                                          \
        if (!(condition)) {                                                       \
            fprintf(TEST_OUT, "    %s:%d: %s\n", __FILE__, __LINE__, #condition); \
            test_failed = 1;                                                      \
            return;                                                               \
        }                                                                         \
    } while (0)

#define ENSURE_NEAR(a, b, tolerance)                                                                              \
    do {                                                                                                          \
        double test_a = (double)(a), test_b = (double)(b);                                                        \
        if (!(fabs(test_a - test_b) <= (double)(tolerance))) {                                                    \
            fprintf(TEST_OUT, "    %s:%d: %s is %.9g, %s is %.9g\n", __FILE__, __LINE__, #a, test_a, #b, test_b); \
            test_failed = 1;                                                                                      \
            return;                                                                                               \
        }                                                                                                         \
    } while (0)

/* The call failed, and left this status and a text with `part` in it; the context is cleared for the next. */
#define ENSURE_ERROR(ctx, failed, status, part)                                                           \
    do {                                                                                                  \
        ENSURE(failed);                                                                                   \
        if (hpml_ctx_status(ctx) != (status) || !strstr(hpml_ctx_error(ctx), part)) {                     \
            fprintf(TEST_OUT, "    %s:%d: \"%s\" is not in error %d, \"%s\"\n", __FILE__, __LINE__, part, \
                    (int)hpml_ctx_status(ctx), hpml_ctx_error(ctx));                                      \
            test_failed = 1;                                                                              \
            return;                                                                                       \
        }                                                                                                 \
        hpml_ctx_clear_error(ctx);                                                                        \
    } while (0)

#define SKIP(reason)           \
    do {                       \
        test_skipped = reason; \
        return;                \
    } while (0)

#ifndef TEST_NO_MAIN
int main(int argc, char **argv)
{
    const char *filter = argc > 2 && strcmp(argv[1], "--filter") == 0 ? argv[2] : "";
    const char *only   = argc > 2 && strcmp(argv[1], "--test") == 0 ? argv[2] : NULL;
    int         passed = 0, failed = 0, skipped = 0;
    for (test_case *t = test_first; t; t = t->next) {
        if (argc > 1 && strcmp(argv[1], "--list") == 0) {
            puts(t->name);
            continue;
        }
        if (only ? strcmp(t->name, only) != 0 : !strstr(t->name, filter)) continue;
        test_failed  = 0;
        test_skipped = NULL;
        t->run();
        if (test_failed) fprintf(TEST_OUT, "FAIL %s\n", t->name), failed++;
        else if (test_skipped) printf("skip %s (%s)\n", t->name, test_skipped), skipped++;
        else printf("ok %s\n", t->name), passed++;
        fflush(stdout);
#ifdef TEST_GIVE_UP
        if (test_failed) break;
#endif
    }
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
#ifdef TEST_GIVE_UP
    if (failed) fflush(stdout), TEST_GIVE_UP();
#endif
    return failed > 0 ? 1 : passed == 0 && skipped > 0 ? 77 : 0;
}
#endif

#endif
