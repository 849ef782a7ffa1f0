/* A line chart as an SVG file that any browser opens: round ticks, linear or logarithmic axes, a mark and a dash of its
   own for each line, and the names beside the chart, where they hide nothing. One file to copy; needs libc and libm. */
#ifndef HPML_PLOT_H
#define HPML_PLOT_H

#include <math.h>
#include <stdio.h>

typedef struct plot_series {
    const char  *name;
    const float *x, *y; /* (count); left out: points that are NaN, infinite, or not above 0 on a logarithmic axis */
    int          count;
} plot_series;

typedef struct plot_chart {
    const char        *path, *title, *xlabel, *ylabel;
    const plot_series *series; /* (count) */
    int                count;
    int                log_x, log_y; /* 0: a linear axis; 2 or 10: logarithmic, with ticks at powers of this base */
} plot_chart;

/* An axis: numbers from `low` to `high` (of their logarithms, if base is not 0) lie between pixels from and to. */
typedef struct plot_axis {
    double low, high, step; /* step: from tick to tick */
    double from, to;
    int    base;
} plot_axis;

/* The number as it lies on the axis; NaN: it does not. */
static double plot_value(int base, double v)
{
    if (base == 0) return v - v == 0 ? v : NAN;
    return v > 0 && v - v == 0 ? log(v) / log(base) : NAN;
}

static double plot_pixel(const plot_axis *a, double v)
{
    return a->from + (a->to - a->from) * (plot_value(a->base, v) - a->low) / (a->high - a->low);
}

/* The smallest of 1, 2 or 5 times a power of ten that is not below `least`. */
static double plot_round(double least)
{
    double power = pow(10, floor(log10(least)));
    if (power >= least * 0.999999) return power;
    if (2 * power >= least * 0.999999) return 2 * power;
    return 5 * power >= least * 0.999999 ? 5 * power : 10 * power;
}

/* The axis for all numbers of a chart: x (y: is_y), with limits at ticks. Linear y axes of numbers above 0 begin at
   0. */
static plot_axis plot_axis_of(const plot_chart *c, int is_y, double from, double to)
{
    plot_axis a = { HUGE_VAL, -HUGE_VAL, 1, from, to, is_y ? c->log_y : c->log_x };
    for (int i = 0; i < c->count; i++)
        for (int j = 0; j < c->series[i].count; j++) {
            double v = plot_value(a.base, (double)(is_y ? c->series[i].y[j] : c->series[i].x[j]));
            if (v < a.low) a.low = v;
            if (v > a.high) a.high = v;
        }
    if (a.low > a.high) a.low = 0, a.high = 1; /* there are no points */
    if (a.base == 0 && is_y && a.low > 0) a.low = 0;
    if (a.high - a.low < 1e-9 * (fabs(a.high) + 1e-9)) a.high = a.low + 1;
    if (a.base == 0) a.step = plot_round((a.high - a.low) / 6);
    else a.step = ceil((a.high - a.low) / 8);
    a.low = a.step * floor(a.low / a.step + 1e-6);
    if (is_y || a.base) a.high = a.step * ceil(a.high / a.step - 1e-6);
    return a;
}

static void plot_text(FILE *f, const char *text) /* writes a text with the signs that XML needs */
{
    for (; *text; text++) {
        if (*text == '&') fputs("&amp;", f);
        else if (*text == '<') fputs("&lt;", f);
        else fputc(*text, f);
    }
}

static void plot_ticks(FILE *f, const plot_axis *x, const plot_axis *y)
{
    for (int is_y = 0; is_y < 2; is_y++) {
        const plot_axis *a = is_y ? y : x;
        int              n = (int)((a->high - a->low) / a->step + 1e-6);
        for (int i = 0; i <= n; i++) {
            double at    = a->low + a->step * i;
            double value = a->base ? pow(a->base, at) : at, pixel = plot_pixel(a, value);
            if (fabs(value) < 1e-9 * a->step && !a->base) value = 0;
            if (is_y) fprintf(f, "<path d=\"M%g %gH%g\" stroke=\"#ddd\"/>", x->from, pixel, x->to);
            else fprintf(f, "<path d=\"M%g %gV%g\" stroke=\"#eee\"/>", pixel, y->from, y->to);
            const char *anchor = is_y ? "end" : "middle";
            double      left   = is_y ? x->from - 6 : pixel;
            double      top    = is_y ? pixel + 4 : y->from + 20;
            fprintf(f, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">%.6g</text>\n", left, top, anchor, value);
        }
    }
}

/* Draws mark number `shape` around a point. */
static void plot_mark(FILE *f, int shape, double x, double y, const char *colour)
{
    static const char *const shapes[] = {
        "m-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0", "m-3.5,-3.5h7v7h-7z", "m0,-4.5l4.5,8h-9z", "m0,-5l5,5l-5,5l-5,-5z",
        "m-4,-4l8,8m0,-8l-8,8", "m-5,0h10m-5,-5v10" };
    fprintf(f, "<path d=\"M%.1f,%.1f%s\" fill=\"%s\" stroke=\"%s\" stroke-width=\"1.6\"/>\n", x, y, shapes[shape % 6],
            shape % 6 < 4 ? colour : "none", colour);
}

/* Draws line number i and its name. */
static void plot_line(FILE *f, const plot_chart *c, int i, const plot_axis *x, const plot_axis *y)
{
    static const char *const colours[] = { "#4477aa", "#ee6677", "#228833", "#ccbb44", "#aa3377", "#66ccee" };
    static const char *const dashes[]  = { "none", "8 3", "2 3", "10 3 2 3", "5 5", "14 4" };
    const plot_series *s = &c->series[i];
    const char        *colour = colours[i % 6];
    int                every = s->count / 10 + 1, draws = 0;
    double             at = y->to + 14 + 22 * i;
    for (int j = 0; j <= s->count; j++) { /* a line for each run of points without a gap */
        double px = j < s->count ? plot_pixel(x, (double)s->x[j]) : NAN;
        double py = j < s->count ? plot_pixel(y, (double)s->y[j]) : NAN;
        int    on = px - px == 0 && py - py == 0;
        if (on && !draws)
            fprintf(f, "<polyline fill=\"none\" stroke-width=\"1.6\" stroke=\"%s\" stroke-dasharray=\"%s\" points=\"",
                    colour, dashes[i % 6]);
        if (on) fprintf(f, "%.1f,%.1f ", px, py);
        else if (draws) fprintf(f, "\"/>\n");
        draws = on;
    }
    for (int j = i % every; j < s->count; j += every) {
        double px = plot_pixel(x, (double)s->x[j]), py = plot_pixel(y, (double)s->y[j]);
        if (px - px == 0 && py - py == 0) plot_mark(f, i, px, py, colour);
    }
    fprintf(f, "<path d=\"M%g %gh24\" stroke-width=\"1.6\" stroke=\"%s\" stroke-dasharray=\"%s\"/>\n", x->to + 16, at,
            colour, dashes[i % 6]);
    plot_mark(f, i, x->to + 28, at, colour);
    fprintf(f, "<text x=\"%g\" y=\"%g\">", x->to + 46, at + 4);
    plot_text(f, s->name);
    fprintf(f, "</text>\n");
}

/* Draws a chart. 0, or -1 when the file cannot be written. */
static inline int plot_draw(const plot_chart *c)
{
    plot_axis x = plot_axis_of(c, 0, 80, 640), y = plot_axis_of(c, 1, 370, 50);
    FILE     *f = fopen(c->path, "w");
    if (!f) return -1;
    fprintf(f, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 880 420\" font-family=\"sans-serif\" "
               "font-size=\"13\">\n<rect width=\"880\" height=\"420\" fill=\"#fff\"/>\n"
               "<text x=\"360\" y=\"28\" text-anchor=\"middle\" font-size=\"16\">");
    plot_text(f, c->title);
    fprintf(f, "</text>\n<text x=\"360\" y=\"412\" text-anchor=\"middle\">");
    plot_text(f, c->xlabel);
    fprintf(f, "</text>\n<text x=\"16\" y=\"210\" text-anchor=\"middle\" transform=\"rotate(-90 16 210)\">");
    plot_text(f, c->ylabel);
    fprintf(f, "</text>\n");
    plot_ticks(f, &x, &y);
    for (int i = 0; i < c->count; i++) plot_line(f, c, i, &x, &y);
    fprintf(f, "</svg>\n");
    int failed = ferror(f);
    return fclose(f) == 0 && !failed ? 0 : -1;
}

/* The same with linear axes. */
static inline int plot_svg(const char *path, const char *title, const char *xlabel, const char *ylabel,
                           const plot_series *s, int n)
{
    plot_chart c = { path, title, xlabel, ylabel, s, n, 0, 0 };
    return plot_draw(&c);
}

#endif
