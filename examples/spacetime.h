/* Draws the message log of hpml_launch as a space-time diagram: time runs to the right, each rank is a line, each
   message an arrow from its sender's line to its receiver's, each computation a bar. To copy into your own program;
   needs hpml_comm.h above it:

       hpml_message_record record[1000];
       hpml_message_log    log = { record, 1000, 0 };
       hpml_launch(&(hpml_launch_desc){ .run = "clock:4", .log = &log, .network = ... }, rank_main, NULL, NULL, 0);
       spacetime_svg("build/ring.svg", "ring allreduce", &log);
       spacetime_text(stdout, &log, 80);

   The caption has messages, bytes, seconds, the longest chain of messages, and whether the log was full. */
#ifndef HPML_SPACETIME_H
#define HPML_SPACETIME_H

#include <math.h>
#include <stdio.h>
#include <string.h>

typedef struct spacetime {
    const hpml_message_log *log;
    int64_t                 count, messages, bytes, depth; /* records that were kept; messages among them, ... */
    int                     ranks;
    double                  first, last; /* seconds */
} spacetime;

static bool spacetime_is_message(const hpml_message_record *r) { return r->tag >= 0; }

static spacetime spacetime_of(const hpml_message_log *log)
{
    spacetime s = { log, log->count < log->capacity ? log->count : log->capacity, 0, 0, 0, 0, 0, 0 };
    for (int64_t i = 0; i < s.count; i++) {
        const hpml_message_record *r    = &log->record[i];
        const int                  most = r->from > r->to ? r->from : r->to;
        if (most >= s.ranks) s.ranks = most + 1;
        if (i == 0 || r->start < s.first) s.first = r->start;
        if (i == 0 || r->end > s.last) s.last = r->end;
        if (!spacetime_is_message(r)) continue;
        s.messages++;
        s.bytes += r->bytes;
        if (r->depth > s.depth) s.depth = r->depth;
    }
    return s;
}

/* The unit in which a span of so many seconds is shown, and how many of it are in a second. */
typedef struct spacetime_unit { const char *name; double per_second; } spacetime_unit;

static spacetime_unit spacetime_unit_of(double seconds)
{
    if (seconds < 1e-3) return (spacetime_unit){ "us", 1e6 };
    if (seconds < 1) return (spacetime_unit){ "ms", 1e3 };
    return (spacetime_unit){ "s", 1 };
}

/* Writes, as a text of `size` bytes, what the diagram shows. */
static void spacetime_caption(const spacetime *s, char *text, size_t size)
{
    const double         seconds = s->last - s->first;
    const spacetime_unit unit    = spacetime_unit_of(seconds);
    int n = snprintf(text, size, "%lld messages, %lld bytes, %.4g %s", (long long)s->messages,
                              (long long)s->bytes, seconds * unit.per_second, unit.name);
    if (s->depth > 0) n += snprintf(text + n, size - (size_t)n, ", longest chain %lld", (long long)s->depth);
    if (s->count < s->log->count)
        snprintf(text + n, size - (size_t)n, "; the log was full: %lld of %lld records", (long long)s->count,
                 (long long)s->log->count);
}

/* A round step, 1, 2 or 5 times a power of ten, that divides `range` into at most `most` parts. */
static double spacetime_step(double range, int most)
{
    static const double round[] = { 1, 2, 5 };
    double              step = 1e-12;
    for (int i = 0; range > step * most && i < 100; i++) step = round[i % 3] * 1e-12 * pow(10, i / 3);
    return step;
}

static double spacetime_x(const spacetime *s, double time, double left, double width)
{
    return s->last > s->first ? left + width * (time - s->first) / (s->last - s->first) : left;
}

enum { SPACETIME_WIDTH = 900, SPACETIME_LEFT = 70, SPACETIME_TOP = 70, SPACETIME_ROW = 46 };

/* The axis of time, a step in round numbers for each of about eight lines, and a line for each rank. */
static void spacetime_axes(FILE *f, const spacetime *s)
{
    const double bottom = SPACETIME_TOP + SPACETIME_ROW * (s->ranks - 1) + 24, range = s->last - s->first;
    const double step   = spacetime_step(range, 8);
    const spacetime_unit unit = spacetime_unit_of(range);
    for (double t = 0; t <= range && range > 0; t += step) {
        const double x = spacetime_x(s, s->first + t, SPACETIME_LEFT, SPACETIME_WIDTH - SPACETIME_LEFT - 20);
        fprintf(f, "<path d=\"M%.1f %dV%.0f\" stroke=\"#ddd\"/><text x=\"%.1f\" y=\"%.0f\" text-anchor=\"middle\">%.4g"
                   "</text>\n", x, SPACETIME_TOP - 20, bottom, x, bottom + 18, t * unit.per_second);
    }
    fprintf(f, "<text x=\"%d\" y=\"%.0f\" text-anchor=\"end\">%s</text>\n", SPACETIME_LEFT - 14, bottom + 18,
            unit.name);
    for (int r = 0; r < s->ranks; r++) {
        const int y = SPACETIME_TOP + SPACETIME_ROW * r;
        fprintf(f, "<text x=\"%d\" y=\"%d\" text-anchor=\"end\">rank %d</text>", SPACETIME_LEFT - 14, y + 4, r);
        fprintf(f, "<path d=\"M%d %dH%d\" stroke=\"#888\"/>\n", SPACETIME_LEFT, y, SPACETIME_WIDTH - 20);
    }
}

/* Writes the diagram as SVG. 0, or -1: the file cannot be written, or the log is empty. */
static __attribute__((unused)) int spacetime_svg(const char *path, const char *title, const hpml_message_log *log)
{
    const spacetime s = spacetime_of(log);
    char            caption[256];
    FILE           *f = s.count > 0 ? fopen(path, "w") : NULL;
    if (!f) return -1;
    spacetime_caption(&s, caption, sizeof caption);
    fprintf(f, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" font-family=\"sans-serif\" "
               "font-size=\"13\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n<defs><marker id=\"head\" "
               "viewBox=\"0 0 8 8\" refX=\"8\" refY=\"4\" markerWidth=\"8\" markerHeight=\"8\" orient=\"auto\"><path "
               "d=\"M0 0L8 4L0 8z\" fill=\"#4477aa\"/></marker></defs>\n", SPACETIME_WIDTH,
            SPACETIME_TOP + SPACETIME_ROW * (s.ranks - 1) + 60);
    fprintf(f, "<text x=\"%d\" y=\"24\" font-size=\"16\">%s</text>", SPACETIME_LEFT, title);
    fprintf(f, "<text x=\"%d\" y=\"42\" fill=\"#666\">%s</text>\n", SPACETIME_LEFT, caption);
    spacetime_axes(f, &s);
    for (int64_t i = 0; i < s.count; i++) {
        const hpml_message_record *r = &log->record[i];
        const double               width = SPACETIME_WIDTH - SPACETIME_LEFT - 20;
        const double x0 = spacetime_x(&s, r->start, SPACETIME_LEFT, width);
        const double x1 = spacetime_x(&s, r->end, SPACETIME_LEFT, width);
        const int    y0 = SPACETIME_TOP + SPACETIME_ROW * r->from, y1 = SPACETIME_TOP + SPACETIME_ROW * r->to;
        if (!spacetime_is_message(r))
            fprintf(f, "<rect x=\"%.1f\" y=\"%d\" width=\"%.1f\" height=\"12\" fill=\"#ccbb44\" fill-opacity=\"0.7\">"
                       "<title>%.6g to %.6g s</title></rect>\n", x0, y0 - 6, x1 - x0, r->start, r->end);
        else
            fprintf(f, "<path d=\"M%.1f %dL%.1f %d\" stroke=\"#4477aa\" stroke-width=\"1.4\" marker-end=\"url(#head)\">"
                       "<title>rank %d to %d, tag %d, %lld bytes, %.6g to %.6g s</title></path>\n", x0, y0, x1, y1,
                    r->from, r->to, r->tag, (long long)r->bytes, r->start, r->end);
    }
    fprintf(f, "</svg>\n");
    return fclose(f) == 0 ? 0 : -1;
}

/* Puts a mark into a rank's line of text; a place that has another mark already becomes '*'. */
static void spacetime_mark(char *line, int at, char mark)
{
    line[at] = line[at] == '.' || line[at] == '=' || line[at] == mark ? mark : '*';
}

/* Prints the diagram as text of `columns` columns: for each rank a line of '.', in which '=' is a computation, '>' the
   start of a message, a digit the column before its arrival: the last digit of the sender's rank; '*' several. */
static __attribute__((unused)) void spacetime_text(FILE *f, const hpml_message_log *log, int columns)
{
    const spacetime s = spacetime_of(log);
    if (columns < 40) columns = 40;
    if (columns > 500) columns = 500;
    const int       width = columns - 10;
    char            caption[256], line[512];
    spacetime_caption(&s, caption, sizeof caption);
    for (int rank = 0; rank < s.ranks; rank++) {
        memset(line, '.', (size_t)width);
        line[width] = 0;
        for (int message = 0; message < 2; message++) /* computations first, because messages are marked on them */
            for (int64_t i = 0; i < s.count; i++) {
                const hpml_message_record *r = &log->record[i];
                const int x0 = (int)spacetime_x(&s, r->start, 0, width - 1);
                const int x1 = (int)spacetime_x(&s, r->end, 0, width - 1), before = x1 > x0 ? x1 - 1 : x1;
                if (spacetime_is_message(r) != (message == 1)) continue;
                for (int x = x0; x <= x1 && !message && r->from == rank; x++) line[x] = '=';
                if (message && r->from == rank) spacetime_mark(line, x0, '>');
                if (message && r->to == rank) spacetime_mark(line, before, (char)('0' + r->from % 10));
            }
        fprintf(f, "rank %3d  %s\n", rank, line);
    }
    fprintf(f, "          %s\n", caption);
}

#endif
