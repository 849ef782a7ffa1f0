/* A test program consists of TEST(name) { ... ENSURE(condition); ENSURE_NEAR(a, b, tolerance); }; main is here.
   Options: --filter TEXT runs the tests whose names contain TEXT, --test NAME runs one test, --list prints the names.
   A test that took a second or more of processor time is printed with its seconds. TEST_PLAIN(name): a test for builds
   without a sanitizer. A build with one leaves the test out unless HPML_TEST_ALL is set (ninja test-all), because the
   test takes long there and runs hardly any code that other tests do not run. TEST_LONG(name): a test that every build
   leaves out unless HPML_TEST_ALL is set. TEST_ACCURACY(name): a long test of what trainings learn, which builds with a
   sanitizer always leave out. A test that --test or --filter names runs in any case.
   Exit status: 0 all passed, 1 some failed, 77 all were skipped. */
#ifndef HPML_TEST_H
#define HPML_TEST_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Is this a build with a sanitizer, which is so slow that a test repeats its cases less often? */
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define SLOW_BUILD 1
#else
#define SLOW_BUILD 0
#endif

/* Does a test repeat its cases for all numbers of ranks and all variants? Else a build with a sanitizer takes a few. */
#define ALL_CASES (!SLOW_BUILD || getenv("HPML_TEST_ALL"))

/* for (...), over the allreduce algorithms from `first` on, without the transport's own. */
#define EACH_ALGORITHM(a, first) \
    for (int a = (first); a < HPML_ALGORITHM_COUNT; a++) \
        if (a == HPML_NATIVE) continue; \
        else

typedef struct test_case {
    const char       *name;
    void            (*run)(void);
    int               plain; /* 1: of TEST_PLAIN; 2: of TEST_LONG; 3: of TEST_ACCURACY */
    struct test_case *next;
} test_case;

/* A program may define TEST_OUT, the stream for failures, and TEST_GIVE_UP(), which is called after the first failure
   and ends the program. */
#ifndef TEST_OUT
#define TEST_OUT stdout
#endif

static test_case  *test_first, **test_last = &test_first;
static int         test_failed;
static const char *test_skipped;

#define TEST(name)       TEST_CASE(name, 0)
#define TEST_PLAIN(name) TEST_CASE(name, 1)
#define TEST_LONG(name)  TEST_CASE(name, 2)
#define TEST_ACCURACY(name) TEST_CASE(name, 3)

/* Registers the test before main runs. */
#define TEST_CASE(name, is_plain)                                        \
    static void name(void);                                              \
    static test_case test_case_##name = { #name, name, is_plain, NULL }; \
    __attribute__((constructor)) static void test_add_##name(void)       \
    {                                                                    \
        *test_last = &test_case_##name;                                  \
        test_last  = &test_case_##name.next;                             \
    }                                                                    \
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

/* Ensures that a call failed, with this status and an error text that contains `part`; clears the error. */
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
        if (t->plain > (SLOW_BUILD ? 0 : 1) && argc == 1 && !getenv("HPML_TEST_ALL")) continue;
        if (t->plain == 3 && argc == 1 && SLOW_BUILD) continue;
        test_failed  = 0;
        test_skipped = NULL;
        double began = (double)clock();
        t->run();
        double seconds = ((double)clock() - began) / CLOCKS_PER_SEC;
        failed += test_failed != 0;
        skipped += !test_failed && test_skipped;
        passed += !test_failed && !test_skipped;
        if (test_failed) fprintf(TEST_OUT, "FAIL %s\n", t->name);
        else if (test_skipped) printf("skip %s (%s)\n", t->name, test_skipped);
        else if (seconds >= 1) printf("ok %s, %.0f s\n", t->name, seconds);
        else printf("ok %s\n", t->name);
        fflush(stdout);
#ifdef TEST_GIVE_UP
        if (test_failed) break;
#endif
    }
    if (argc > 2 && passed + failed + skipped == 0) {
        fprintf(TEST_OUT, "FAIL no test has the name %s\n", argv[2]);
        failed = 1;
    }
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
#ifdef TEST_GIVE_UP
    fflush(stdout);
    if (failed) TEST_GIVE_UP();
#endif
    return failed > 0 ? 1 : passed == 0 && skipped > 0 ? 77 : 0;
}
#endif

#endif
