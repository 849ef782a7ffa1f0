/* Exercise 01: checks gradient descent, on a line through points. */
#include "../grade.h"

/* n points (x[i], y[i]). The line is w[0] + w[1] x, its loss the mean over the points of (w[0] + w[1] x - y)^2. */
typedef struct points {
    const double *x, *y;
    int           n;
} points;

/* g[0], g[1]: the derivatives of the loss of `data` with respect to w[0], w[1]. */
typedef void gradient_fn(const void *data, const double w[2], double g[2]);
void line_gradient(const void *data, const double w[2], double g[2]);

/* From w takes `steps` steps of gradient descent: w becomes w - rate * gradient. Stops at the first step that makes
   w[0] or w[1] infinite or NaN. Returns how many steps it has taken, the last one included. */
int descend(gradient_fn *gradient, const void *data, double w[2], double rate, int steps);

/* The rate above which descent on the line's loss diverges. */
double largest_rate(const points *data);

static points random_points(void)
{
    const int n = grade_int(20, 60);
    double   *x = (double *)grade_memory("x", (size_t)n * sizeof(double));
    double   *y = (double *)grade_memory("y", (size_t)n * sizeof(double));
    for (int i = 0; i < n; i++) {
        x[i] = grade_real(-1, 3);
        y[i] = 0.5 + 2 * x[i] + grade_real(-0.1, 0.1);
    }
    return (points){ x, y, n };
}

static double loss(const points *d, double w0, double w1)
{
    double sum = 0;
    for (int i = 0; i < d->n; i++) {
        const double error = w0 + w1 * d->x[i] - d->y[i];
        sum += error * error;
    }
    return sum / d->n;
}

static bool near(double a, double b, double tolerance) { return fabs(a - b) <= tolerance * fmax(1, fabs(b)); }

/* The loss is a quadratic function, so that its difference quotients are exact but for rounding. */
static bool gradient_of_line(void)
{
    for (int i = 0; i < 20; i++) {
        const points d    = random_points();
        const double w[2] = { grade_real(-2, 2), grade_real(-2, 2) }, h = 1e-3;
        const double exact[2] = { (loss(&d, w[0] + h, w[1]) - loss(&d, w[0] - h, w[1])) / (2 * h),
                                  (loss(&d, w[0], w[1] + h) - loss(&d, w[0], w[1] - h)) / (2 * h) };
        double       g[2] = { NAN, NAN };
        line_gradient(&d, w, g);
        for (int k = 0; k < 2; k++) {
            if (near(g[k], exact[k], 1e-8)) continue;
            if (near(g[k], d.n * exact[k], 1e-8))
                return grade_fail("g[%d] is %d times too large, and there are %d points: the loss is a mean, not a sum",
                                  k, d.n, d.n);
            return grade_fail("g[%d] is %g at w = (%g, %g), the difference quotient of the loss is %g%s", k, g[k], w[0],
                              w[1], exact[k],
                              near(2 * g[k], exact[k], 1e-8) ? ": the square's factor 2 is missing" : "");
        }
    }
    return true;
}

/* A bowl whose gradient notes how often and where it was asked for. */
typedef struct bowl {
    double a, b, c; /* gradient (a w0 + b w1, b w0 + c w1) */
    double seen[2];
    int    calls;
} bowl;

static void bowl_gradient(const void *data, const double w[2], double g[2])
{
    bowl *b    = (bowl *)(uintptr_t)data;
    b->seen[0] = w[0];
    b->seen[1] = w[1];
    b->calls++;
    g[0] = b->a * w[0] + b->b * w[1];
    g[1] = b->b * w[0] + b->c * w[1];
}

static bool steps(void)
{
    for (int count = 0; count <= 5; count++) {
        bowl         b    = { 2, grade_real(0.5, 1), 1, { 0, 0 }, 0 };
        const double from[2] = { grade_real(1, 2), grade_real(1, 2) }, rate = grade_real(0.1, 0.3);
        double       w[2] = { from[0], from[1] }, v[2] = { from[0], from[1] }, g[2];
        const int    taken = descend(bowl_gradient, &b, w, rate, count), calls = b.calls;
        for (int k = 0; k < count; k++) {
            bowl_gradient(&b, v, g);
            v[0] -= rate * g[0];
            v[1] -= rate * g[1];
        }
        if (taken != count) return grade_fail("%d steps are asked for, and descend returns %d", count, taken);
        if (count == 1 && near(w[0], 2 * from[0] - v[0], 1e-12))
            return grade_fail("the step goes uphill: w - rate * gradient goes down");
        if (calls != count) return grade_fail("%d steps ask for %d gradients: one each is enough", count, calls);
        if (!near(w[0], v[0], 1e-12) || !near(w[1], v[1], 1e-12))
            return grade_fail("after %d step(s) from (%g, %g), w is (%.9g, %.9g), and should be (%.9g, %.9g)", count,
                              from[0], from[1], w[0], w[1], v[0], v[1]);
    }
    return true;
}

static bool divergence(void)
{
    bowl      b = { 2, 0, 1, { 0, 0 }, 0 };
    double    w[2] = { 1, 1 }, v = 1;
    int       steps = 0;
    const double rate = grade_real(1.5, 3);
    while (isfinite(v)) {
        v -= rate * 2 * v;
        steps++;
    }
    const int taken = descend(bowl_gradient, &b, w, rate, 100000);
    if (taken == 100000)
        return grade_fail("w became infinite in step %d, and descend went on to step 100000: stop at the first step "
                          "that makes w infinite or NaN", steps);
    if (taken != steps) return grade_fail("w becomes infinite in step %d, and descend returns %d", steps, taken);
    return isfinite(w[0]) ? grade_fail("w is to stay as the last step has made it, infinite") : true;
}

static bool bound(void)
{
    for (int i = 0; i < 20; i++) {
        const points d = random_points();
        double       m = 0, s = 0;
        for (int k = 0; k < d.n; k++) {
            m += d.x[k] / d.n;
            s += d.x[k] * d.x[k] / d.n;
        }
        /* The second derivatives are 2 (1, m; m, s); their largest eigenvalue: */
        const double most = 1 + s + sqrt((1 - s) * (1 - s) + 4 * m * m), rate = largest_rate(&d);
        if (near(rate, 1 / most, 1e-9))
            return grade_fail("%g is half the bound: at 1 / eigenvalue a step ends at the minimum, at 2 / eigenvalue "
                              "as far on the other side", rate);
        if (!near(rate, 2 / most, 1e-9))
            return grade_fail("the rate %g is not the bound, %g: 2 / the largest eigenvalue of the matrix of second "
                              "derivatives", rate, 2 / most);
    }
    return true;
}

static bool both_sides(void)
{
    const points d       = random_points();
    const double rate    = largest_rate(&d);
    double       inside[2] = { 5, 5 }, outside[2] = { 5, 5 }, g[2] = { NAN, NAN };
    descend(line_gradient, &d, inside, 0.98 * rate, 5000);
    descend(line_gradient, &d, outside, 1.02 * rate, 5000);
    line_gradient(&d, inside, g);
    if (!(fabs(g[0]) + fabs(g[1]) < 1e-9))
        return grade_fail("at 0.98 times your bound, 5000 steps do not reach the minimum: the gradient is (%g, %g)",
                          g[0], g[1]);
    return loss(&d, outside[0], outside[1]) > 1e6 || !isfinite(loss(&d, outside[0], outside[1]))
               ? true
               : grade_fail("at 1.02 times your bound, 5000 steps do not diverge: the bound is too low");
}

static const grade_case cases[] = {
    { "the gradient of a line's loss", 25, gradient_of_line },
    { "steps of descent", 25, steps },
    { "stops where it diverges", 15, divergence },
    { "the largest rate", 20, bound },
    { "converges below this rate, diverges above it", 15, both_sides },
};
int main(int argc, char **argv) { return GRADE("01 gradient descent", cases); }
