/* Exercise 01: gradient descent. The task is in README.md; `ninja ex01` builds and checks your copy, mine.c. */
#include "check.h"

void line_gradient(const void *data, const double w[2], double g[2])
{
    /* >> gradient */
    const points *d = (const points *)data;
    g[0] = 0;
    g[1] = 0;
    for (int i = 0; i < d->n; i++) {
        const double error = w[0] + w[1] * d->x[i] - d->y[i];
        g[0] += 2 * error / d->n;
        g[1] += 2 * error * d->x[i] / d->n;
    }
    /* << HPML_TODO("the gradient of the loss"); */
}

int descend(gradient_fn *gradient, const void *data, double w[2], double rate, int steps)
{
    /* >> descent */
    for (int k = 1; k <= steps; k++) {
        double g[2];
        gradient(data, w, g);
        w[0] -= rate * g[0];
        w[1] -= rate * g[1];
        if (!isfinite(w[0]) || !isfinite(w[1])) return k;
    }
    return steps;
    /* << HPML_TODO("the steps of descent"); */
}

double largest_rate(const points *data)
{
    /* >> rate */
    double m = 0, s = 0; /* the second derivatives are 2 (1, m; m, s) */
    for (int i = 0; i < data->n; i++) {
        m += data->x[i] / data->n;
        s += data->x[i] * data->x[i] / data->n;
    }
    return 2 / (1 + s + sqrt((1 - s) * (1 - s) + 4 * m * m));
    /* << HPML_TODO("2 / the largest eigenvalue of the second derivatives"); */
}
