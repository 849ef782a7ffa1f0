/* A timeline's file, read back by a strict reader of JSON: trace_read says what is wrong with it, or NULL. Right is an
   array in UTF-8 with, for each rank, a process of its name and the lanes in which it has spans, no others; spans that
   have name, ph, ts, dur, pid and tid and do not overlap within a lane: one begins after the other has ended, or is a
   part of it; counters, each with a number of its name; arrows whose ends lie within spans of their lanes and of which
   no second one has the id. */
#ifndef HPML_TRACE_H
#define HPML_TRACE_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TRACE_MOST = 20000, TRACE_RANKS = 16, TRACE_LANES = 5 };
/* Of args: ARG is what a name is, VALUE is what has the event's name; TENSORS, BUCKET and BYTES have theirs. */
enum { TRACE_PH, TRACE_NAME, TRACE_ARG, TRACE_TENSORS, TRACE_CAT, TRACE_BP, TRACE_TEXTS, TRACE_TS = TRACE_TEXTS,
       TRACE_DUR, TRACE_PID, TRACE_TID, TRACE_ID, TRACE_BUCKET, TRACE_BYTES, TRACE_VALUE, TRACE_FIELDS };
typedef struct trace_span { char text[TRACE_TEXTS][64]; double number[TRACE_FIELDS]; unsigned has; } trace_span;
typedef struct trace {
    trace_span span[TRACE_MOST]; /* spans by rank, lane, time; then the other events */
    int        spans, events;
    double     first;            /* time of the first event that has one */
} trace;
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
    static const char *const fields[2][TRACE_VALUE] = {
        { "ph", "name", "", "", "cat", "bp", "ts", "dur", "pid", "tid", "id", "", "" },
        { "", "", "name", "tensors", "", "", "", "", "", "", "", "bucket", "bytes" } };
    char c = trace_next(t), text[64] = { 0 };
    int  field = depth == 3 && strcmp(key, s->text[TRACE_NAME]) == 0 ? TRACE_VALUE : TRACE_FIELDS;
    for (int i = 0; i < TRACE_VALUE && (depth == 2 || depth == 3); i++)
        if (*key && strcmp(key, fields[depth - 2][i]) == 0) field = i;
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
            trace_want(t, t->to->events < TRACE_MOST);
            if (t->bad) return;
            trace_value(t, depth == 0 ? &t->to->span[t->to->events++] : s, text, depth + 1);
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

/* What an event of each kind must have, as bits. Spans come first, then all else. */
static const char *trace_events(trace *t, int ranks)
{
    static const struct { const char *ph; unsigned has, may; } kinds[] = {
        { "X", 1u << TRACE_DUR | 1u << TRACE_TID, 1u << TRACE_TENSORS | 1u << TRACE_BUCKET | 1u << TRACE_BYTES },
        { "C", 1u << TRACE_VALUE | 1u << TRACE_TID, 0 },
        { "s", 1u << TRACE_CAT | 1u << TRACE_ID | 1u << TRACE_TID, 0 },
        { "f", 1u << TRACE_CAT | 1u << TRACE_ID | 1u << TRACE_BP | 1u << TRACE_TID, 0 } };
    static const char *const lanes[TRACE_LANES] = { "compute", "communication", "input", "gpu", "steps" };
    char   process[TRACE_RANKS] = { 0 }, lane[TRACE_RANKS][TRACE_LANES] = { { 0 } }, name[24];
    bool   used[TRACE_RANKS][TRACE_LANES] = { { 0 } };
    t->first = 1e300;
    for (int i = 0; i < t->events; i++) {
        trace_span *s = &t->span[i], other = t->span[t->spans];
        bool metadata = strcmp(s->text[TRACE_PH], "M") == 0, whole = strcmp(s->text[TRACE_NAME], "process_name") == 0;
        int  pid = (int)s->number[TRACE_PID], tid = (int)s->number[TRACE_TID], k = 0;
        if (pid < 0 || pid >= ranks || pid != s->number[TRACE_PID] || tid < 0 || tid >= TRACE_LANES ||
            tid != s->number[TRACE_TID])
            return "no such rank or lane";
        unsigned always = 1u << TRACE_PH | 1u << TRACE_NAME | 1u << TRACE_PID;
        if (metadata) {
            snprintf(name, sizeof name, "rank %d", pid);
            if (s->has != (always | 1u << TRACE_ARG | (whole ? 0 : 1u << TRACE_TID))) return "metadata lack a field";
            if (strcmp(s->text[TRACE_ARG], whole ? name : lanes[tid]) != 0) return "a rank or lane has another name";
            (*(whole ? &process[pid] : &lane[pid][tid]))++;
            continue;
        }
        while (k < 4 && strcmp(s->text[TRACE_PH], kinds[k].ph) != 0) k++;
        if (k == 4) return "an event of another kind";
        if ((s->has & ~kinds[k].may) != (always | 1u << TRACE_TS | kinds[k].has)) return "an event lacks a field";
        if (s->number[TRACE_TS] < t->first) t->first = s->number[TRACE_TS];
        if (k > 0) continue;
        if (s->number[TRACE_DUR] < 0) return "a span ends before it begins";
        used[pid][tid]        = true;
        t->span[t->spans++] = *s, *s = other;
    }
    for (int r = 0; r < ranks; r++)
        for (int l = 0; l < TRACE_LANES; l++)
            if (process[r] != 1 || lane[r][l] != used[r][l]) return "a rank or lane is missing, empty, or there twice";
    return NULL;
}

/* The arrow's other end; NULL: there is none. */
static const trace_span *trace_arrow(const trace *t, const trace_span *end)
{
    for (const trace_span *s = t->span + t->spans; s < t->span + t->events; s++)
        if (s != end && s->number[TRACE_ID] == end->number[TRACE_ID] && (s->has >> TRACE_ID & 1)) return s;
    return NULL;
}

/* Of the numbers of counters of this name and rank, how many there are, and the last. */
__attribute__((unused)) static int trace_counters(const trace *t, int rank, const char *name, double *last)
{
    int n = 0;
    for (const trace_span *s = t->span + t->spans; s < t->span + t->events; s++) {
        if (strcmp(s->text[TRACE_PH], "C") != 0 || strcmp(s->text[TRACE_NAME], name) != 0) continue;
        if ((int)s->number[TRACE_PID] != rank) continue;
        *last = s->number[TRACE_VALUE];
        n++;
    }
    return n;
}

/* Each end lies in a span of its lane; what has the same id is one departure and one arrival, which comes later. */
static const char *trace_arrows(const trace *t)
{
    for (const trace_span *s = t->span + t->spans; s < t->span + t->events; s++) {
        const trace_span *in = t->span, *other;
        if (!(s->has >> TRACE_ID & 1)) continue;
        for (; in < t->span + t->spans; in++) {
            double after = s->number[TRACE_TS] - in->number[TRACE_TS];
            if (in->number[TRACE_PID] == s->number[TRACE_PID] && in->number[TRACE_TID] == s->number[TRACE_TID] &&
                after >= -0.002 && after <= in->number[TRACE_DUR] + 0.002)
                break;
        }
        if (in == t->span + t->spans) return "an arrow begins or ends outside of all spans";
        other = trace_arrow(t, s);
        if (other && strcmp(other->text[TRACE_PH], s->text[TRACE_PH]) == 0) return "two arrows have one id";
    }
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

static bool trace_utf8(const unsigned char *p)
{
    while (*p) {
        int more = *p >= 0xf5 ? 4 : *p >= 0xf0 ? 3 : *p >= 0xe0 ? 2 : *p >= 0xc2 ? 1 : *p >= 0x80 ? 4 : 0;
        if (more == 4 || (*p == 0xe0 && p[1] < 0xa0) || (*p == 0xed && p[1] > 0x9f) || (*p == 0xf0 && p[1] < 0x90) ||
            (*p == 0xf4 && p[1] > 0x8f))
            return false;
        for (p++; more > 0; more--, p++)
            if (*p >> 6 != 2) return false;
    }
    return true;
}

static const char *trace_read(const char *path, int ranks, trace *to)
{
    char       *text = trace_slurp(path);
    trace_text  t = { text, !text || *text != '[', to };
    const char *wrong;
    memset(to, 0, sizeof *to);
    if (!t.bad) trace_value(&t, NULL, "", 0), trace_want(&t, trace_next(&t) == 0);
    if (text && !trace_utf8((const unsigned char *)text)) t.bad = true;
    free(text);
    if (t.bad) return "this is not JSON in UTF-8, or no array";
    wrong = trace_events(to, ranks);
    if (!wrong) wrong = trace_overlap(to);
    return wrong ? wrong : trace_arrows(to);
}
#endif
