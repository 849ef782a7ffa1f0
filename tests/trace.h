/* A timeline's file, read back by a strict reader of JSON: trace_read says what is wrong with it, or NULL. Right is an
   array with, for each rank, a process of its name and its four lanes; and spans that have name, ph, ts, dur, pid and
   tid and do not overlap within a lane: one begins after the other has ended, or is a part of it. */
#ifndef HPML_TRACE_H
#define HPML_TRACE_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TRACE_MOST = 20000, TRACE_RANKS = 16, TRACE_LANES = 4 };
enum { TRACE_PH, TRACE_NAME, TRACE_ARG, TRACE_TS, TRACE_DUR, TRACE_PID, TRACE_TID, TRACE_FIELDS };
typedef struct trace_span { char text[3][64]; double number[TRACE_FIELDS]; unsigned has; } trace_span; /* by field */
typedef struct trace { trace_span span[TRACE_MOST]; int spans; } trace; /* by rank, lane and time */
typedef struct trace_text { const char *at; bool bad; trace *to; } trace_text;

static char trace_next(trace_text *t)
{
    while (*t->at && strchr(" \t\r\n", *t->at)) t->at++;
    return *t->at;
}

static bool trace_is(trace_text *t, char c) { return trace_next(t) == c && t->at++; }
static void trace_want(trace_text *t, bool good) { t->bad = t->bad || !good; }

static void trace_string(trace_text *t, char to[64])
{
    int n = 0;
    trace_want(t, trace_is(t, '"'));
    for (; !t->bad && *t->at != '"'; t->at++) {
        bool escaped = *t->at == '\\' && t->at++;
        trace_want(t, (unsigned char)*t->at >= 32 && (!escaped || strchr("\"\\/bfnrtu", *t->at)));
        for (int i = 1; i <= 4 && escaped && *t->at == 'u' && !t->bad; i++)
            trace_want(t, t->at[i] && strchr("0123456789abcdefABCDEF", t->at[i]));
        if (n < 63) to[n++] = *t->at;
    }
    to[n] = 0;
    if (!t->bad) t->at++;
}

static int trace_digits(trace_text *t)
{
    const char *start = t->at;
    while (*t->at >= '0' && *t->at <= '9') t->at++;
    return (int)(t->at - start);
}

static double trace_number(trace_text *t)
{
    const char *start = t->at;
    if (*t->at == '-') t->at++;
    bool zero = *t->at == '0';
    int  n = trace_digits(t);
    trace_want(t, n > 0 && !(zero && n > 1));
    if (*t->at == '.') t->at++, trace_want(t, trace_digits(t) > 0);
    if (*t->at == 'e' || *t->at == 'E') {
        t->at += t->at[1] == '+' || t->at[1] == '-' ? 2 : 1;
        trace_want(t, trace_digits(t) > 0);
    }
    return t->bad ? 0 : atof(start);
}

/* Any value: the file, an event in it, what an event has, or its args. No field may come twice. */
static void trace_value(trace_text *t, trace_span *s, const char *key, int depth)
{
    static const char *const fields[] = { "ph", "name", "", "ts", "dur", "pid", "tid" };
    char c = trace_next(t), text[64] = { 0 };
    int  field = depth == 3 && strcmp(key, "name") == 0 ? TRACE_ARG : TRACE_FIELDS;
    for (int i = 0; i < TRACE_FIELDS && depth == 2; i++) if (strcmp(key, fields[i]) == 0) field = i;
    trace_want(t, depth < 9 && (field == TRACE_FIELDS || (!(s->has >> field & 1) && (c == '"') == (field < TRACE_TS))));
    if (field < TRACE_FIELDS) s->has |= 1u << field;
    if (t->bad) return;
    if (c == '"') {
        trace_string(t, text);
        if (field < TRACE_TS) memcpy(s->text[field], text, 64);
    } else if (c == '{' || c == '[') {
        char close = c == '{' ? '}' : ']';
        t->at++;
        if (trace_is(t, close)) return;
        do {
            if (c == '{') trace_string(t, text), trace_want(t, trace_is(t, ':'));
            trace_want(t, t->to->spans < TRACE_MOST);
            if (t->bad) return;
            trace_value(t, depth == 0 ? &t->to->span[t->to->spans++] : s, text, depth + 1);
        } while (!t->bad && trace_is(t, ','));
        trace_want(t, trace_is(t, close));
    } else {
        double number = trace_number(t);
        if (field < TRACE_FIELDS) s->number[field] = number;
    }
}

static int trace_order(const void *a, const void *b)
{
    const trace_span *x = (const trace_span *)a, *y = (const trace_span *)b;
    const int         by[] = { TRACE_PID, TRACE_TID, TRACE_TS };
    int               c = strcmp(x->text[TRACE_PH], y->text[TRACE_PH]);
    for (int i = 0; i < 3 && c == 0; i++)
        c = (x->number[by[i]] > y->number[by[i]]) - (x->number[by[i]] < y->number[by[i]]);
    return c ? c : (x->number[TRACE_DUR] < y->number[TRACE_DUR]) - (x->number[TRACE_DUR] > y->number[TRACE_DUR]);
}

/* The events that are spans stay. */
static const char *trace_events(trace *t, int ranks)
{
    static const char *const lanes[TRACE_LANES] = { "compute", "communication", "input", "gpu" };
    char process[TRACE_RANKS] = { 0 }, lane[TRACE_RANKS][TRACE_LANES] = { { 0 } }, name[24];
    int  spans = 0;
    for (int i = 0; i < t->spans; i++) {
        const trace_span *s = &t->span[i];
        bool span = strcmp(s->text[TRACE_PH], "X") == 0, whole = strcmp(s->text[TRACE_NAME], "process_name") == 0;
        int  pid = (int)s->number[TRACE_PID], tid = (int)s->number[TRACE_TID];
        if (pid < 0 || pid >= ranks || pid != s->number[TRACE_PID] || tid < 0 || tid >= TRACE_LANES ||
            tid != s->number[TRACE_TID])
            return "no such rank or lane";
        snprintf(name, sizeof name, "rank %d", pid);
        if (span) t->span[spans++] = *s;
        if (s->has != (span ? 0x7bu : whole ? 0x27u : 0x67u)) return "an event lacks a field";
        if (!span && strcmp(s->text[TRACE_PH], "M") != 0) return "an event of another kind";
        if (!span && strcmp(s->text[TRACE_ARG], whole ? name : lanes[tid]) != 0)
            return "a rank or a lane has another name";
        if (!span) (*(whole ? &process[pid] : &lane[pid][tid]))++;
        if (span && s->number[TRACE_DUR] < 0) return "a span ends before it begins";
    }
    for (int r = 0; r < ranks; r++)
        for (int l = 0; l < TRACE_LANES; l++)
            if (process[r] != 1 || lane[r][l] != 1) return "a rank or a lane is missing, or there twice";
    t->spans = spans;
    return NULL;
}

static const char *trace_overlap(trace *t)
{
    static char said[200];
    double      end[8]; /* of the spans that the next one may be a part of */
    int         open = 0;
    qsort(t->span, (size_t)t->spans, sizeof *t->span, trace_order);
    for (int i = 0; i < t->spans; i++) {
        const trace_span *s = &t->span[i], *before = s - (i > 0);
        /* both are cut off after nanoseconds */
        double ts = s->number[TRACE_TS], last = ts + s->number[TRACE_DUR], slack = 0.002;
        if (before->number[TRACE_PID] != s->number[TRACE_PID] || before->number[TRACE_TID] != s->number[TRACE_TID])
            open = 0;
        while (open > 0 && end[open - 1] <= ts + slack) open--;
        snprintf(said, sizeof said, "rank %.0f, lane %.0f: \"%s\" at %.3f overlaps \"%s\"", s->number[TRACE_PID],
                 s->number[TRACE_TID], s->text[TRACE_NAME], ts, before->text[TRACE_NAME]);
        if (open == 8 || (open > 0 && last > end[open - 1] + slack)) return said;
        end[open++] = last;
    }
    return NULL;
}

/* All that is in a file, free it; NULL when it cannot be read. */
static char *trace_slurp(const char *path)
{
    FILE *f = fopen(path, "rb");
    char *text = f && fseek(f, 0, SEEK_END) == 0 ? (char *)calloc(1, (size_t)ftell(f) + 1) : NULL;
    if (text) {
        size_t size = (size_t)ftell(f);
        rewind(f);
        if (fread(text, 1, size, f) != size) text[0] = 0;
    }
    if (f) fclose(f);
    return text;
}

static const char *trace_read(const char *path, int ranks, trace *to)
{
    char       *text = trace_slurp(path);
    trace_text  t = { text, !text || *text != '[', to };
    const char *wrong;
    memset(to, 0, sizeof *to);
    if (!t.bad) trace_value(&t, NULL, "", 0), trace_want(&t, trace_next(&t) == 0);
    free(text);
    if (t.bad) return "this is not JSON, or no array";
    wrong = trace_events(to, ranks);
    return wrong ? wrong : trace_overlap(to);
}
#endif
