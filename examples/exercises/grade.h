/* Grades an exercise: cases with points, each in a process of its own, so that a crash, an endless loop or a missing
   function costs the points of one case. An exercise's check.h includes this file, declares the functions that the
   student writes, and ends with a table of cases:

       static bool sums(void) { return x == 3 || grade_fail("1 + 2 is 3, but x is %d", x); }
       static const grade_case cases[] = { { "sums", 10, sums } };
       int main(int argc, char **argv) { return GRADE("01_descent", cases); }

   Options: --seed N other numbers (default 1), --json FILE results for graders, --case NAME this case alone, in this
   process and without limits, for a debugger, --draw FILE.svg a picture of the messages of this case, or of the first.
   Exit status: 0 full marks, 1 not, 2 wrong options. Nothing that is graded depends on wall time. */
#ifndef GRADE_H
#define GRADE_H

#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef GRADE_CPU_SECONDS
#define GRADE_CPU_SECONDS 10
#endif
enum { GRADE_WALL_SECONDS = 300, GRADE_GUARD = 16, GRADE_TEXT = 1024 };

typedef struct grade_case {
    const char *name;
    int         points;
    bool      (*run)(void); /* false: grade_fail has been called */
} grade_case;

typedef enum grade_end { GRADE_RIGHT, GRADE_WRONG, GRADE_TODO } grade_end;

typedef struct grade_array { /* the bytes lie behind it, between two guard zones */
    struct grade_array *next;
    const char         *name;
    size_t              bytes;
} grade_array;

static uint64_t     grade_seed = 1, grade_state;
static int          grade_pipe = -1; /* the case's process writes its text here; -1: to standard output */
static char         grade_text[GRADE_TEXT];
static grade_array *grade_arrays;
static const char  *grade_draw; /* file for a picture of messages: ranks.h; NULL: none */

/* Ends the case's process, with a byte and a text in the pipe, because a student's code may set the exit status. */
static __attribute__((noreturn)) void grade_exit(grade_end end)
{
    const unsigned char verdict = (unsigned char)end;
    if (grade_pipe < 0) printf("%s\n", end == GRADE_RIGHT ? "right" : grade_text);
    else if (write(grade_pipe, &verdict, 1) != 1 || write(grade_pipe, grade_text, strlen(grade_text)) < 0) _exit(2);
    fflush(NULL);
    _exit(end != GRADE_RIGHT);
}

/* Notes why the case fails, and returns false. The first text of a case counts. */
static __attribute__((format(printf, 1, 2), unused)) bool grade_fail(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    if (!grade_text[0]) vsnprintf(grade_text, sizeof grade_text, format, args);
    va_end(args);
    return false;
}

/* In starter.c, for what the student writes: ends the case with "not implemented yet". */
static __attribute__((noreturn, unused)) void HPML_TODO(const char *what)
{
    snprintf(grade_text, sizeof grade_text, "not implemented yet: %s", what);
    grade_exit(GRADE_TODO);
}

/* Random numbers, the same for the same seed and case: 64 bits (splitmix64); a whole number from low to high; a real
   number from low to high. */
static uint64_t grade_bits(void)
{
    uint64_t z = grade_state += 0x9e3779b97f4a7c15u;
    z          = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z          = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}
static __attribute__((unused)) int grade_int(int low, int high)
{
    return low + (int)(grade_bits() % (uint64_t)(high - low + 1));
}
static __attribute__((unused)) double grade_real(double low, double high)
{
    return low + (high - low) * (double)(grade_bits() >> 11) * 0x1p-53;
}

/* Memory for `bytes` bytes of 0xff (as floats: NaN) between two guard zones, which are checked when the case ends. */
static __attribute__((unused)) void *grade_memory(const char *name, size_t bytes)
{
    grade_array *a    = (grade_array *)malloc(sizeof *a + bytes + 2 * GRADE_GUARD);
    char        *data = (char *)(a + 1) + GRADE_GUARD;
    if (!a) exit(2);
    a->next  = grade_arrays;
    a->name  = name;
    a->bytes = bytes;
    memset(data - GRADE_GUARD, 0xA5, GRADE_GUARD);
    memset(data, 0xff, bytes);
    memset(data + bytes, 0xA5, GRADE_GUARD);
    grade_arrays = a;
    return data;
}
static __attribute__((unused)) float *grade_floats(const char *name, int64_t n)
{
    return (float *)grade_memory(name, (size_t)n * sizeof(float));
}

static bool grade_guards(void)
{
    for (const grade_array *a = grade_arrays; a; a = a->next) {
        const unsigned char *before = (const unsigned char *)(a + 1), *behind = before + GRADE_GUARD + a->bytes;
        for (int i = 0; i < GRADE_GUARD; i++) {
            if (behind[i] != 0xA5) return grade_fail("a write behind the last element of %s", a->name);
            if (before[i] != 0xA5) return grade_fail("a write before the first element of %s", a->name);
        }
    }
    return true;
}

static grade_end grade_run(const grade_case *c, int index)
{
    grade_state = grade_seed * 1000 + (uint64_t)index;
    return c->run() && grade_guards() && !grade_text[0] ? GRADE_RIGHT : GRADE_WRONG;
}

/* Runs a case in a process of its own, which may use GRADE_CPU_SECONDS of processor time. */
static grade_end grade_fork(const grade_case *c, int index)
{
    int           ends[2], status = 0;
    unsigned char verdict;
    pid_t         child;
    fflush(NULL);
    if (pipe(ends) || (child = fork()) < 0) exit(2);
    if (child == 0) {
        const struct rlimit limit = { GRADE_CPU_SECONDS, GRADE_CPU_SECONDS };
        grade_pipe                = ends[1];
        close(ends[0]);
        setrlimit(RLIMIT_CPU, &limit);
        alarm(GRADE_WALL_SECONDS); /* for a case that sleeps for ever */
        grade_exit(grade_run(c, index));
    }
    close(ends[1]);
    const bool has_verdict = read(ends[0], &verdict, 1) == 1;
    size_t     length      = 0;
    for (ssize_t got; (got = read(ends[0], grade_text + length, GRADE_TEXT - 1 - length)) > 0;) length += (size_t)got;
    grade_text[length] = 0;
    close(ends[0]);
    waitpid(child, &status, 0);
    if (has_verdict) return (grade_end)verdict;
    if (WIFEXITED(status)) grade_fail("your code has called exit(%d)", WEXITSTATUS(status));
    else if (WTERMSIG(status) == SIGKILL || WTERMSIG(status) == SIGXCPU || WTERMSIG(status) == SIGALRM)
        grade_fail("no end after %d s: is there a loop without an end?", GRADE_CPU_SECONDS);
    else
        grade_fail("your code has crashed (%s); to find out where: gdb --args ./program --case '%s'",
                   strsignal(WTERMSIG(status)), c->name);
    return GRADE_WRONG;
}

/* Writes a text in quotes, as JSON does. */
static void grade_quote(FILE *f, const char *text)
{
    fputc('"', f);
    for (; *text; text++) {
        if (*text == '"' || *text == '\\') fprintf(f, "\\%c", *text);
        else if ((unsigned char)*text < 0x20) fprintf(f, "\\u%04x", (unsigned)*text);
        else fputc(*text, f);
    }
    fputc('"', f);
}

/* One test of the JSON form that Gradescope and others read: {"tests": [{"name": ..., "score": ...}, ...]}. */
static void grade_json(FILE *f, const grade_case *c, bool first, grade_end end)
{
    fprintf(f, "%s\n  {\"name\": ", first ? "" : ",");
    grade_quote(f, c->name);
    fprintf(f, ", \"score\": %d, \"max_score\": %d, \"output\": ", end == GRADE_RIGHT ? c->points : 0, c->points);
    grade_quote(f, grade_text);
    fputc('}', f);
}

/* Prints a text after `indent` blanks, broken into lines of at most 100 columns. */
static void grade_print(const char *text, int indent)
{
    int column = printf("%*s", indent, "");
    while (*text) {
        const int length = (int)strcspn(text, " ");
        if (column > indent && column + length > 99) column = printf("\n%*s", indent, "") - 1;
        else if (column > indent) column += printf(" ");
        column += printf("%.*s", length, text);
        text += length + (text[length] == ' ');
    }
    printf("\n");
}

static int grade_all(const char *exercise, const grade_case *cases, int count, FILE *json)
{
    static const char *const words[] = { "ok", "WRONG", "todo" };
    int                      points = 0, full = 0, todo = 0;
    printf("%s, seed %llu\n", exercise, (unsigned long long)grade_seed);
    if (json) fprintf(json, "{\"tests\": [");
    for (int i = 0; i < count; i++) {
        grade_text[0] = 0;
        grade_end end = grade_fork(&cases[i], i);
        full += cases[i].points;
        points += end == GRADE_RIGHT ? cases[i].points : 0;
        printf("  %-5s %2d of %2d  %s\n", words[end], end == GRADE_RIGHT ? cases[i].points : 0, cases[i].points,
               cases[i].name);
        if (end == GRADE_WRONG || (end == GRADE_TODO && !todo++)) grade_print(grade_text, 18);
        if (json) grade_json(json, &cases[i], i == 0, end);
    }
    printf("%d of %d points\n", points, full);
    if (json) fprintf(json, "\n], \"score\": %d}\n", points);
    return points < full;
}

#define GRADE(exercise, cases) grade_main(exercise, cases, (int)(sizeof(cases) / sizeof(cases)[0]), argc, argv)
static int grade_main(const char *exercise, const grade_case *cases, int count, int argc, char **argv)
{
    const char *only = NULL;
    FILE       *json = NULL;
    bool        bad  = argc % 2 == 0;
    for (int i = 1; i + 1 < argc; i += 2) {
        char *end = NULL;
        if (!strcmp(argv[i], "--seed")) grade_seed = strtoull(argv[i + 1], &end, 10);
        else if (!strcmp(argv[i], "--case")) only = argv[i + 1];
        else if (!strcmp(argv[i], "--draw")) grade_draw = argv[i + 1];
        else if (strcmp(argv[i], "--json") || !(json = fopen(argv[i + 1], "w"))) bad = true;
        if (end && (*end || end == argv[i + 1])) bad = true;
    }
    if (grade_draw && !only) only = cases[0].name;
    for (int i = 0; only && !bad && i < count; i++)
        if (!strcmp(cases[i].name, only)) grade_exit(grade_run(&cases[i], i));
    if (bad || only) {
        fprintf(stderr, "usage: %s [--seed N] [--json FILE] [--case NAME] [--draw FILE.svg]\n", argv[0]);
        return 2;
    }
    const int wrong = grade_all(exercise, cases, count, json);
    return json && fclose(json) ? 2 : wrong;
}

#endif
