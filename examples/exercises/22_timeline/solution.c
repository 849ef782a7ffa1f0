/* Exercise 22: reading a timeline. The task is in README.md; `ninja ex22` builds and checks your copy, mine.c. */
#include "check.h"

/* >> helpers */
enum { MARKS_MAX = 2 * TIMELINE_MAX + 2 };

typedef struct mark { /* a start or an end of a span */
    double time;
    int    computes, communicates; /* how many spans of the rank more are open from here on */
} mark;

static int mark_compare(const void *a, const void *b)
{
    const double x = ((const mark *)a)->time, y = ((const mark *)b)->time;
    return x < y ? -1 : x > y;
}
/* << // Functions that you need go here. */

/* Reads the report of rank `rank` from the spans of all ranks, which are in any order. */
timeline_report timeline_read(const timeline_span *s, int n, int rank)
{
    /* >> read */
    static mark     marks[MARKS_MAX];
    timeline_report r = { 0, 0, 0, 0 };
    int             count = 0, computing = 0, communicating = 0;
    for (int i = 0; i < n; i++) { /* spans of other ranks open nothing, but the timeline begins and ends with them */
        const int computes = s[i].rank == rank && s[i].computes, communicates = s[i].rank == rank && !s[i].computes;
        marks[count++] = (mark){ s[i].start, computes, communicates };
        marks[count++] = (mark){ s[i].end, -computes, -communicates };
    }
    qsort(marks, (size_t)count, sizeof *marks, mark_compare);
    for (int k = 0; k + 1 < count; k++) {
        const double seconds = marks[k + 1].time - marks[k].time;
        computing += marks[k].computes;
        communicating += marks[k].communicates;
        if (computing > 0) r.computes += seconds;
        if (communicating > 0) r.communicates += seconds;
        if (communicating > 0 && computing == 0) r.exposed += seconds;
        if (communicating == 0 && computing == 0) r.idle += seconds;
    }
    return r;
    /* << HPML_TODO("the seconds of a rank's timeline"); */
}
