/* What the main job shows while it runs and when it is done: a live line, a confusion matrix, digits as text, CSV and
   SVG. */
#ifndef HPML_REPORT_H
#define HPML_REPORT_H

#include "plot.h"
#include "screen.h"

#include <stdlib.h>
#include <unistd.h>

typedef struct report {
    float *step, *raw[2];          /* (count) of each step: loss, accuracy; and */
    float *loss, *accuracy;        /* (count) smoothed: a twentieth of each step, the rest as before */
    int    count, capacity, epochs, live, workers;
    double last;
} report;

static int report_step(const hpml_step_info *i, void *user)
{
    report *r    = (report *)user;
    float   old  = r->count > 0 ? 0.95f : 0;
    char    line[256];
    if (r->count == r->capacity) {
        r->capacity = r->capacity ? 2 * r->capacity : 1024;
        r->step     = (float *)realloc(r->step, sizeof(float) * (size_t)r->capacity);
        r->loss     = (float *)realloc(r->loss, sizeof(float) * (size_t)r->capacity);
        r->accuracy = (float *)realloc(r->accuracy, sizeof(float) * (size_t)r->capacity);
        for (int k = 0; k < 2; k++) r->raw[k] = (float *)realloc(r->raw[k], sizeof(float) * (size_t)r->capacity);
        if (!r->step || !r->loss || !r->accuracy || !r->raw[0] || !r->raw[1]) return 1;
    }
    r->step[r->count]     = (float)i->step, r->raw[0][r->count] = i->loss, r->raw[1][r->count] = i->accuracy;
    r->loss[r->count]     = (1 - old) * i->loss + (r->count > 0 ? old * r->loss[r->count - 1] : 0);
    r->accuracy[r->count] = (1 - old) * i->accuracy + (r->count > 0 ? old * r->accuracy[r->count - 1] : 0);
    r->count++;
    if (i->seconds - r->last < (r->live ? 0.1 : 5) && i->epoch_step < i->epoch_steps) return 0;
    r->last = i->seconds;
    hpml_step_info shown = *i;
    shown.loss     = r->loss[r->count - 1];
    shown.accuracy = r->accuracy[r->count - 1];
    shown.samples_per_second *= r->workers > 0 ? r->workers : 1;
    hpml_progress_text(&shown, r->epochs, r->live ? screen_columns() - 1 : 120, line, sizeof line);
    if (r->live) printf("\r%s\033[K", line); /* \033[K clears the rest of the line */
    else printf("%s", line);
    if (!r->live || i->epoch_step == i->epoch_steps) printf("\n");
    fflush(stdout);
    return 0;
}

static void report_confusion(const int64_t *c, int classes)
{
    printf("\nconfusion (row: digit, column: what it was taken for)\n   ");
    for (int j = 0; j < classes; j++) printf("%5d", j);
    for (int i = 0; i < classes; i++) {
        printf("\n%3d", i);
        for (int j = 0; j < classes; j++)
            if (c[i * classes + j]) printf("%5lld", (long long)c[i * classes + j]);
            else printf("    .");
    }
    printf("\n");
}

/* As many misclassified digits as fit side by side, each 28 columns wide; three at most. */
static void report_mistakes(const hpml_dataset *d, const float *scores)
{
    const unsigned char *x = (const unsigned char *)d->x;
    const int32_t       *y = (const int32_t *)d->y;
    int64_t              wrong[3];
    int                  taken[3], n = 0, most = (screen_columns() - 1 + 5) / 33;
    if (most > 3) most = 3;
    for (int64_t i = 0; i < d->count && n < most; i++) {
        int best = 0;
        for (int c = 1; c < 10; c++)
            if (scores[10 * i + c] > scores[10 * i + best]) best = c;
        if (best != y[i]) wrong[n] = i, taken[n++] = best;
    }
    for (int k = 0; k < n; k++) printf("%s%d taken for %-*d", k ? "" : "\n", y[wrong[k]], k + 1 < n ? 21 : 1, taken[k]);
    if (n > 0) printf("\n");
    for (int row = 0; row < 28 && n > 0; row += 2) {
        for (int k = 0; k < n; k++) {
            for (const unsigned char *p = x + 784 * wrong[k] + 28 * row, *end = p + 28; p < end; p++)
                putchar(" .:-=+*#%@"[(p[0] + p[28]) * 9 / 510]); /* two rows of pixels are one of text */
            if (k + 1 < n) printf("     ");
        }
        printf("\n");
    }
}

/* Writes DIR/loss.csv: the values of each step, and smoothed. 0, or -1 when that fails. */
static int report_csv(const report *r, const char *dir)
{
    char  path[1024];
    FILE *f;
    snprintf(path, sizeof path, "%s/loss.csv", dir);
    f = fopen(path, "w");
    if (!f) return -1;
    fprintf(f, "step,loss,accuracy,loss_smoothed,accuracy_smoothed\n");
    for (int i = 0; i < r->count; i++)
        fprintf(f, "%.0f,%.6f,%.6f,%.6f,%.6f\n", (double)r->step[i], (double)r->raw[0][i], (double)r->raw[1][i],
                (double)r->loss[i], (double)r->accuracy[i]);
    return fclose(f) == 0 ? 0 : -1;
}

/* Draws DIR/loss.svg: the smoothed curves of one training, or the losses of several with their names. 0, or -1 when
   that fails. */
static int report_plot(const report *r, const char *const *names, int count, const char *dir)
{
    plot_series s[8];
    char        path[1024];
    int         n = 0;
    snprintf(path, sizeof path, "%s/loss.svg", dir);
    for (int i = 0; i < count && n < 8; i++)
        s[n++] = (plot_series){ count > 1 ? names[i] : "loss", r[i].step, r[i].loss, r[i].count };
    if (count == 1) s[n++] = (plot_series){ "training accuracy", r->step, r->accuracy, r->count };
    return plot_svg(path, "Training", "step", count > 1 ? "loss (smoothed)" : "loss, accuracy (smoothed)", s, n);
}

/* Prints the names of the files written: plots and timeline. */
static void report_drawn(const char *dir, const char *plots)
{
    char text[1024];
    snprintf(text, sizeof text, "in %s: %s, to open in a browser; trace.json, the timeline of 20 steps, to open in "
             "ui.perfetto.dev", dir, plots);
    screen_paragraph(text);
}

static void report_free(report *r)
{
    free(r->step);
    free(r->raw[0]);
    free(r->raw[1]);
    free(r->loss);
    free(r->accuracy);
}

#endif
