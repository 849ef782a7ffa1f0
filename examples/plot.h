/* A line chart as an SVG file that any browser opens. Used by the examples. */
#ifndef HPML_PLOT_H
#define HPML_PLOT_H

#include <stdio.h>

typedef struct plot_series {
    const char  *name;
    const float *x, *y; /* (count) */
    int          count;
} plot_series;

static void plot_range(const plot_series *s, int n, double range[4])
{
    range[0] = range[2] = 1e30;
    range[1] = range[3] = -1e30;
    for (int i = 0; i < n; i++)
        for (int j = 0; j < s[i].count; j++) {
            double x = (double)s[i].x[j], y = (double)s[i].y[j];
            if (x < range[0]) range[0] = x;
            if (x > range[1]) range[1] = x;
            if (y < range[2]) range[2] = y;
            if (y > range[3]) range[3] = y;
        }
    if (range[2] > 0) range[2] = 0;
    if (!(range[1] > range[0])) range[1] = range[0] + 1;
    if (!(range[3] > range[2])) range[3] = range[2] + 1;
}

/* 0, or -1 when the file cannot be written. */
static int plot_svg(const char *path, const char *title, const char *xlabel, const char *ylabel,
                    const plot_series *s, int n)
{
    static const char *const colour[] = { "#4477aa", "#ee6677", "#228833", "#ccbb44", "#aa3377", "#66ccee" };
    double r[4];
    FILE  *f = fopen(path, "w");
    if (!f) return -1;
    plot_range(s, n, r);
    /* names stand in the corner that is free */
    int rises = n > 0 && s[0].count > 0 && s[0].y[s[0].count - 1] > s[0].y[0];
    fprintf(f, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 720 420\" font-family=\"sans-serif\" "
               "font-size=\"13\">\n<rect width=\"720\" height=\"420\" fill=\"#fff\"/>\n"
               "<text x=\"360\" y=\"24\" text-anchor=\"middle\" font-size=\"16\">%s</text>\n"
               "<text x=\"380\" y=\"412\" text-anchor=\"middle\">%s</text>\n"
               "<text x=\"16\" y=\"210\" text-anchor=\"middle\" transform=\"rotate(-90 16 210)\">%s</text>\n",
            title, xlabel, ylabel);
    for (int i = 0; i <= 5; i++) {
        double y = 370 - 64.0 * i, x = 60 + 128.0 * i;
        fprintf(f, "<path d=\"M60 %gH700\" stroke=\"#ddd\"/><text x=\"54\" y=\"%g\" text-anchor=\"end\">%.3g</text>\n",
                y, y + 4, r[2] + (r[3] - r[2]) * i / 5);
        fprintf(f, "<text x=\"%g\" y=\"390\" text-anchor=\"middle\">%.4g</text>\n", x, r[0] + (r[1] - r[0]) * i / 5);
    }
    for (int i = 0; i < n; i++) {
        fprintf(f, "<polyline fill=\"none\" stroke-width=\"1.6\" stroke=\"%s\" points=\"", colour[i % 6]);
        for (int j = 0; j < s[i].count; j++)
            fprintf(f, "%.1f,%.1f ", 60 + 640 * ((double)s[i].x[j] - r[0]) / (r[1] - r[0]),
                    370 - 320 * ((double)s[i].y[j] - r[2]) / (r[3] - r[2]));
        fprintf(f, "\"/>\n<text x=\"%d\" y=\"%d\" text-anchor=\"%s\" fill=\"%s\">%s</text>\n", rises ? 70 : 690,
                60 + 18 * i, rises ? "start" : "end", colour[i % 6], s[i].name);
    }
    fprintf(f, "</svg>\n");
    return fclose(f) == 0 ? 0 : -1;
}

#endif
