/* What the main job shows while it runs and when it is done: a live line, a confusion matrix, digits as text, CSV and
   SVG. */
#ifndef HPML_REPORT_H
#define HPML_REPORT_H

#include "plot.h"

#include <stdlib.h>
#include <sys/stat.h>
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
    double  all  = (double)(i->epoch_steps * r->epochs), done = (double)(i->epoch * i->epoch_steps + i->epoch_step);
    float   old  = r->count > 0 ? 0.95f : 0;
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
    printf("%sepoch %d/%d  step %lld/%lld  loss %.4f  accuracy %5.2f %%  %.0f samples/s  %.0f s left %s",
           r->live ? "\r" : "", (int)i->epoch + 1, r->epochs, (long long)i->epoch_step, (long long)i->epoch_steps,
           (double)r->loss[r->count - 1], 100 * (double)r->accuracy[r->count - 1],
           i->samples_per_second * (r->workers > 0 ? r->workers : 1), i->seconds * (all / done - 1),
           r->live ? "  " : "\n");
    if (r->live && i->epoch_step == i->epoch_steps) printf("\n");
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

/* Up to three misclassified digits, side by side. */
static void report_mistakes(const hpml_dataset *d, const float *scores)
{
    const unsigned char *x = (const unsigned char *)d->x;
    const int32_t       *y = (const int32_t *)d->y;
    int64_t              wrong[3];
    int                  taken[3], n = 0;
    for (int64_t i = 0; i < d->count && n < 3; i++) {
        int best = 0;
        for (int c = 1; c < 10; c++)
            if (scores[10 * i + c] > scores[10 * i + best]) best = c;
        if (best != y[i]) wrong[n] = i, taken[n++] = best;
    }
    for (int k = 0; k < n; k++) printf("%s%d taken for %-21d", k ? "" : "\n", y[wrong[k]], taken[k]);
    if (n > 0) printf("\n");
    for (int row = 0; row < 28 && n > 0; row += 2) {
        for (int k = 0; k < n; k++) {
            for (const unsigned char *p = x + 784 * wrong[k] + 28 * row, *end = p + 28; p < end; p++)
                putchar(" .:-=+*#%@"[(p[0] + p[28]) * 9 / 510]); /* two rows of pixels are one of text */
            printf("     ");
        }
        printf("\n");
    }
}

/* build/loss.csv and build/loss.svg */
static int report_files(const report *r)
{
    plot_series s[2];
    FILE       *f;
    mkdir("build", 0777);
    f = fopen("build/loss.csv", "w");
    if (!f) return -1;
    fprintf(f, "step,loss,accuracy,loss_smoothed,accuracy_smoothed\n");
    for (int i = 0; i < r->count; i++)
        fprintf(f, "%.0f,%.6f,%.6f,%.6f,%.6f\n", (double)r->step[i], (double)r->raw[0][i], (double)r->raw[1][i],
                (double)r->loss[i], (double)r->accuracy[i]);
    if (fclose(f) != 0) return -1;
    s[0].name = "loss", s[0].x = r->step, s[0].y = r->loss, s[0].count = r->count;
    s[1].name = "training accuracy", s[1].x = r->step, s[1].y = r->accuracy, s[1].count = r->count;
    return plot_svg("build/loss.svg", "Training", "step", "loss, accuracy (smoothed)", s, 2);
}

#endif
