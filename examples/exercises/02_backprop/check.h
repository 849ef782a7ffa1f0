/* Exercise 02: checks the forward and backward passes of a linear layer and of softmax with cross-entropy. */
#include "../grade.h"

/* Shapes: B samples of I inputs and O outputs. x (B, I), w (O, I), b (O), y (B, O), all row-major. */

/* y = x w^T + b */
void linear_forward(float *y, const float *x, const float *w, const float *b, int B, int I, int O);

/* p (B, O): the softmax of each row of y. Returns the loss: the mean over the samples of -log p[label]. Numbers of y up
   to 1e4 are fine. label (B): 0 to O - 1. */
double softmax_loss(float *p, const float *y, const int *label, int B, int O);

/* dy (B, O): the derivatives of this loss with respect to y. */
void softmax_backward(float *dy, const float *p, const int *label, int B, int O);

/* dy are the derivatives of a loss with respect to y. dx (B, I) becomes those with respect to x; NULL: they are not
   needed. Those with respect to w and b are added to dw (O, I) and db (O), because several uses of a weight add up. */
void linear_backward(float *dx, float *dw, float *db, const float *dy, const float *x, const float *w, int B, int I,
                     int O);

/* All arrays of a layer, filled with whole numbers, so that all sums are exact in every order. */
typedef struct layer {
    int    B, I, O, label[8];
    float *x, *w, *b, *y, *p, *dy, *dx, *dw, *db;
} layer;

static float *filled(const char *name, int count)
{
    float *x = grade_floats(name, count);
    for (int i = 0; i < count; i++) x[i] = (float)grade_int(-8, 8);
    return x;
}

static layer random_layer(int B, int I, int O)
{
    layer l = { .B = B, .I = I, .O = O };
    l.x     = filled("x", B * I);
    l.w     = filled("w", O * I);
    l.b     = filled("b", O);
    l.dy    = filled("dy", B * O);
    l.dw    = filled("dw", O * I);
    l.db    = filled("db", O);
    l.y     = grade_floats("y", B * O);
    l.p     = grade_floats("p", B * O);
    l.dx    = grade_floats("dx", B * I);
    for (int s = 0; s < B; s++) l.label[s] = grade_int(0, O - 1);
    return l;
}

/* Is element i of an array, whose rows have `cols` elements, the expected number? */
static bool equal(const char *name, const float *x, int i, int cols, double expected)
{
    if (fabs(x[i] - expected) <= 1e-5 * fmax(1, fabs(expected))) return true;
    return grade_fail("%s[%d][%d] is %g and should be %g%s", name, i / cols, i % cols, x[i], expected,
                      isnan(x[i]) ? " (NaN: nothing was written here, or it was read before)" : "");
}

static bool forward(void)
{
    for (int k = 0; k < 12; k++) {
        const layer l = random_layer(grade_int(1, 8), grade_int(1, 9), grade_int(2, 7));
        linear_forward(l.y, l.x, l.w, l.b, l.B, l.I, l.O);
        for (int i = 0; i < l.B * l.O; i++) {
            const float *x = l.x + i / l.O * l.I, *w = l.w + i % l.O * l.I;
            double       sum = l.b[i % l.O];
            for (int j = 0; j < l.I; j++) sum += x[j] * w[j];
            if (!equal("y", l.y, i, l.O, sum)) return false;
        }
    }
    return true;
}

static double exact_loss(double *p, const double *y, const int *label, int B, int O)
{
    double loss = 0;
    for (int s = 0; s < B; s++, p += O, y += O) {
        double most = y[0], sum = 0;
        for (int o = 1; o < O; o++) most = fmax(most, y[o]);
        for (int o = 0; o < O; o++) sum += exp(y[o] - most);
        for (int o = 0; o < O; o++) p[o] = exp(y[o] - most) / sum;
        loss += (log(sum) + most - y[label[s]]) / B;
    }
    return loss;
}

static bool softmax_of(layer *l, double scale)
{
    double y[64], p[64];
    for (int i = 0; i < l->B * l->O; i++) {
        l->y[i] = (float)grade_real(-scale, scale);
        y[i]    = l->y[i];
    }
    const double exact = exact_loss(p, y, l->label, l->B, l->O);
    const double loss  = softmax_loss(l->p, l->y, l->label, l->B, l->O);
    if (isnan(loss) || isnan(l->p[0]))
        return grade_fail("numbers up to %g give NaN: exp of a large number is infinite, and infinity / infinity is no "
                          "number; subtract the largest number of the row first, which changes nothing", scale);
    for (int i = 0; i < l->B * l->O; i++)
        if (!equal("p", l->p, i, l->O, p[i])) return false;
    if (isinf(loss))
        return grade_fail("the loss is infinite and should be %g: p[label] is too small for a float, its logarithm is "
                          "not; log p = y - most - log(sum)", exact);
    if (fabs(loss - l->B * exact) < 1e-5 * exact && l->B > 1)
        return grade_fail("the loss is %g, %d times too large: it is the mean over the samples", loss, l->B);
    return fabs(loss - exact) <= 1e-5 * fmax(1, exact) || grade_fail("the loss is %g and should be %g", loss, exact);
}

static bool softmax_small(void)
{
    for (int k = 0; k < 12; k++) {
        layer l = random_layer(grade_int(1, 8), 1, grade_int(2, 7));
        if (!softmax_of(&l, 2)) return false;
    }
    return true;
}

static bool softmax_large(void)
{
    for (int k = 0; k < 12; k++) {
        layer l = random_layer(grade_int(1, 8), 1, grade_int(2, 7));
        if (!softmax_of(&l, 1e4)) return false;
    }
    return true;
}

static bool softmax_derivative(void)
{
    for (int k = 0; k < 12; k++) {
        const layer l = random_layer(grade_int(2, 8), 1, grade_int(2, 7));
        for (int i = 0; i < l.B * l.O; i++) l.p[i] = (float)grade_real(0, 1);
        softmax_backward(l.dy, l.p, l.label, l.B, l.O);
        for (int i = 0; i < l.B * l.O; i++) {
            const double d = l.p[i] - (i % l.O == l.label[i / l.O]);
            if (fabs(l.dy[i] - d) < 1e-6 && fabs(d) > 1e-3)
                return grade_fail("dy is %d times too large: the loss is the mean over %d samples, so that each has a "
                                  "share of 1 / %d", l.B, l.B, l.B);
            if (!equal("dy", l.dy, i, l.O, d / l.B)) return false;
        }
    }
    return true;
}

static bool backward_weights(void)
{
    for (int k = 0; k < 12; k++) {
        const layer l = random_layer(grade_int(2, 8), grade_int(1, 9), grade_int(2, 7));
        double      dw[64], db[8], old[64];
        for (int i = 0; i < l.O; i++) db[i] = l.db[i];
        for (int i = 0; i < l.O * l.I; i++) dw[i] = old[i] = l.dw[i];
        for (int s = 0; s < l.B; s++)
            for (int o = 0; o < l.O; o++) {
                db[o] += l.dy[s * l.O + o];
                for (int j = 0; j < l.I; j++) dw[o * l.I + j] += l.dy[s * l.O + o] * l.x[s * l.I + j];
            }
        linear_backward(l.dx, l.dw, l.db, l.dy, l.x, l.w, l.B, l.I, l.O);
        for (int i = 0; i < l.O * l.I; i++) {
            if (l.dw[i] != dw[i] && l.dw[i] == dw[i] - old[i])
                return grade_fail("dw[%d][%d] is %g and was %g before: add to the old derivative, do not replace it",
                                  i / l.I, i % l.I, l.dw[i], old[i]);
            if (!equal("dw", l.dw, i, l.I, dw[i])) return false;
        }
        for (int i = 0; i < l.O; i++)
            if (!equal("db", l.db, i, l.O, db[i])) return false;
    }
    return true;
}

static bool backward_inputs(void)
{
    for (int k = 0; k < 12; k++) {
        const layer l = random_layer(grade_int(2, 8), grade_int(1, 9), grade_int(2, 7));
        linear_backward(l.dx, l.dw, l.db, l.dy, l.x, l.w, l.B, l.I, l.O);
        for (int i = 0; i < l.B * l.I; i++) {
            double sum = 0;
            for (int o = 0; o < l.O; o++) sum += l.dy[i / l.I * l.O + o] * l.w[o * l.I + i % l.I];
            if (!equal("dx", l.dx, i, l.I, sum)) return false;
        }
        linear_backward(NULL, l.dw, l.db, l.dy, l.x, l.w, l.B, l.I, l.O);
    }
    return true;
}

/* The loss of the whole chain in double precision, with weight i of w changed by `change`. */
static double chain_loss(const layer *l, int i, double change)
{
    double y[64], p[64];
    for (int k = 0; k < l->B * l->O; k++) {
        y[k] = l->b[k % l->O];
        for (int j = 0; j < l->I; j++) {
            const int at = k % l->O * l->I + j;
            y[k] += l->x[k / l->O * l->I + j] * (l->w[at] + (at == i ? change : 0));
        }
    }
    return exact_loss(p, y, l->label, l->B, l->O);
}

static bool chain(void)
{
    const layer l = random_layer(8, 5, 4);
    for (int i = 0; i < l.O * l.I; i++) l.w[i] /= 16;
    memset(l.dw, 0, sizeof(float) * (size_t)(l.O * l.I));
    linear_forward(l.y, l.x, l.w, l.b, l.B, l.I, l.O);
    softmax_loss(l.p, l.y, l.label, l.B, l.O);
    softmax_backward(l.dy, l.p, l.label, l.B, l.O);
    linear_backward(NULL, l.dw, l.db, l.dy, l.x, l.w, l.B, l.I, l.O);
    for (int i = 0; i < l.O * l.I; i++) {
        const double slope = (chain_loss(&l, i, 1e-4) - chain_loss(&l, i, -1e-4)) / 2e-4;
        if (fabs(l.dw[i] - slope) > 1e-5 * fmax(1, fabs(slope)))
            return grade_fail("all four together: dw[%d][%d] is %g, the difference quotient of the loss is %g", i / l.I,
                              i % l.I, l.dw[i], slope);
    }
    return true;
}

static const grade_case cases[] = {
    { "linear forward", 15, forward },
    { "softmax and its loss", 15, softmax_small },
    { "softmax of numbers up to 10000", 10, softmax_large },
    { "derivatives of the loss", 15, softmax_derivative },
    { "linear backward: weights", 20, backward_weights },
    { "linear backward: inputs", 15, backward_inputs },
    { "the whole chain against difference quotients", 10, chain },
};
int main(int argc, char **argv) { return GRADE("02 backward pass of a layer", cases); }
