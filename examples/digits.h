/* digits.h - handwritten-looking digits from a seed, in the shape of MNIST: 28 x 28 bytes, white ink on black.
 *
 *     uint8_t image[DIGITS_PIXELS];
 *     int label = digits_draw(7, 0, image);                   // sample 0 of stream 7: always the same digit
 *     digits_fill(7, 0, 10000, images, labels);               // samples 0..9999, image after image
 *
 * A sample depends on (seed, index) alone, so any part of a stream can be made in any order, by any thread; different
 * seeds give unrelated streams (one to train, one to test). There is no global state, and of libm only sqrtf is used:
 * compilers that do not fuse multiply and add (-ffp-contract=off) make the same bytes everywhere.
 *
 * How a digit is made: pick one of several ways to write it, shake its control points, bend the paper, slant and turn
 * the hand, flatten the curves to short lines, fit them to the picture, and ink every pixel by its distance to a line.
 */
#ifndef DIGITS_H
#define DIGITS_H

#include <math.h>
#include <stdint.h>

#define DIGITS_SIDE   28
#define DIGITS_PIXELS (DIGITS_SIDE * DIGITS_SIDE)
#define DIGITS_FORMS  6   /* ways to write one digit, at most */
#define DIGITS_LATTICE 4  /* the paper is bent at 4 x 4 places */
#define DIGITS_STEPS  4   /* short lines for each piece of curve */
#define DIGITS_POINTS 64  /* control points of one form, corners and ends counted twice */

typedef struct { uint64_t state; } digits_rng;
typedef struct { float x, y; int stroke; } digits_point;
typedef struct { float dx[DIGITS_LATTICE][DIGITS_LATTICE], dy[DIGITS_LATTICE][DIGITS_LATTICE]; } digits_warp;

/* The handwriting. A point is "xy" on a 10 x 10 grid, x to the right and y down. The curve bends towards a point
 * followed by a space, turns sharply at one followed by a comma; a bar lifts the pen. Each stroke starts and ends on
 * its points. */
static inline const char *digits_form(int digit, int form)
{
    static const char *const forms[10][DIGITS_FORMS] = {
        { "50 20 03 06 29 69 96 93 80 50", "60 30 04 19 49 88 94 91 60 40 31", "30 70 93 97 69 29 07 02 20 50 61",
          "50 10 15 19 49 79 85 80 40" },
        { "50 49", "60 39", "32 50,49", "23 50,59|29 79", "41 50,49|29 69", "50 54 49" },
        { "12 20 60 82 64 18,59 89", "22 30 80 83 46 09 27 49 69 98", "11 50 81 64 09 07 37 69 89 98",
          "12 40 81 73 18,88", "02 30 90 84 28 08 06 46 68 98" },
        { "11 30 80 83 54,34 54 95 89 49 08", "10 70,44 84 99 49 08", "21 50 80 73 44 43 53 87 79 39 17",
          "11 40 81 74 34,95 89 39 18" },
        { "41 06,86|63 69", "20 15,85|70 69", "60 06,96|60 69", "20 24 36 85|81 79", "50 06 16 95|62 59" },
        { "80 20,13 53 84 89 39 08", "30 14,53 94 89 39 08|30 90", "81 31,24 54 86 79 39 18",
          "90 50 20 24 34 83 89 59 08" },
        { "60 20 06 19 59 88 84 44 07", "70 13 09 59 87 74 25 17", "50 14 19 49 79 76 55 26 18",
          "80 40 05 19 69 97 74 34 16" },
        { "11 81,39", "11 90 55 49", "00 80,49|24 75", "12 10,80,54 39", "21 80 64 39|25 75" },
        { "71 40 11 23 64 87 79 29 17 34 73 80 50", "50 10 14 54 94 80 40,44|44 04 09 49 99 94 44",
          "81 40 11 14 85 89 29 07 44 82 80 60", "60 20 23 54 86 79 39 17 35 72 70 40" },
        { "82 50 11 15 55 82,80,79", "71 30 02 05 65 82 80 30|81 76 69", "71 40 12 25 64 81,86 79 39 18",
          "70 20 14 54 82 80 50|81 59", "81 40 02 15 64 82,74 49" }
    };
    return forms[digit][form];
}

/* splitmix64: a counter through a hash. */
static inline uint64_t digits_next(digits_rng *rng)
{
    uint64_t z = (rng->state += UINT64_C(0x9E3779B97F4A7C15));
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

static inline digits_rng digits_seed(uint64_t seed, int64_t index)
{
    digits_rng a, b;
    a.state = (uint64_t)index;
    b.state = seed ^ digits_next(&a);
    b.state = digits_next(&b);
    return b;
}

/* Uniform in [low, high). */
static inline float digits_uniform(digits_rng *rng, float low, float high)
{
    return low + (high - low) * ((float)(digits_next(rng) >> 40) / 16777216.0f);
}

/* Bell-shaped around 0 with standard deviation `sigma`, never beyond 3 sigma: the sum of three uniforms. */
static inline float digits_bell(digits_rng *rng, float sigma)
{
    float sum = digits_uniform(rng, -1, 1) + digits_uniform(rng, -1, 1);
    return sigma * (sum + digits_uniform(rng, -1, 1));
}

/* One whole number in 0..n-1. */
static inline int digits_below(digits_rng *rng, int n)
{
    return (int)(((digits_next(rng) >> 32) * (uint64_t)n) >> 32);
}

/* Bends the paper: moves p by the displacements of the four lattice places around it, blended smoothly. */
static inline digits_point digits_bend(const digits_warp *warp, digits_point p)
{
    const float last = (float)(DIGITS_LATTICE - 1);
    float u = fminf(fmaxf(p.x / 9.0f, 0.0f), 0.999f) * last, v = fminf(fmaxf(p.y / 9.0f, 0.0f), 0.999f) * last;
    int i = (int)v, j = (int)u;
    float s = u - (float)j, t = v - (float)i;
    float a, b, c, d; /* weights of the four places */
    s = s * s * (3 - 2 * s);
    t = t * t * (3 - 2 * t);
    a = (1 - s) * (1 - t), b = s * (1 - t), c = (1 - s) * t, d = s * t;
    p.x += a * warp->dx[i][j] + b * warp->dx[i][j + 1] + c * warp->dx[i + 1][j] + d * warp->dx[i + 1][j + 1];
    p.y += a * warp->dy[i][j] + b * warp->dy[i][j + 1] + c * warp->dy[i + 1][j] + d * warp->dy[i + 1][j + 1];
    return p;
}

/* Reads a form into control points, each shaken a little. Corners and ends are written twice: there the curve below
 * passes through its point. Returns how many. */
static inline int digits_control(digits_rng *rng, const char *form, float shake, digits_point *control)
{
    int n = 0, stroke = 0, first = 1;
    for (;; form += 3) {
        int end = form[2] == '\0' || form[2] == '|';
        digits_point p;
        p.x = (float)(form[0] - '0') + digits_bell(rng, shake);
        p.y = (float)(form[1] - '0') + digits_bell(rng, shake);
        p.stroke = stroke;
        control[n++] = p;
        if (first || end || form[2] == ',') control[n++] = p;
        first = end;
        stroke += end;
        if (form[2] == '\0') return n;
    }
}

/* Flattens the quadratic B-spline of the control points: a Bezier curve from the middle of (a, b) to the middle of
 * (b, c), pulled by b, for every three neighbours of one stroke. Bends the paper on the way. Returns how many there
 * are. */
static inline int digits_flatten(const digits_point *control, int n, const digits_warp *warp, digits_point *path)
{
    int i, k, count = 0;
    for (i = 1; i + 1 < n; i++) {
        digits_point a = control[i - 1], b = control[i], c = control[i + 1], p = b;
        if (a.stroke != c.stroke) continue;
        for (k = (i == 1 || control[i - 2].stroke != b.stroke) ? 0 : 1; k <= DIGITS_STEPS; k++) {
            float t = (float)k / (float)DIGITS_STEPS, wa = 0.5f * (1 - t) * (1 - t), wc = 0.5f * t * t;
            p.x = wa * a.x + (1 - wa - wc) * b.x + wc * c.x;
            p.y = wa * a.y + (1 - wa - wc) * b.y + wc * c.y;
            path[count++] = digits_bend(warp, p);
        }
    }
    return count;
}

/* Slants, turns and stretches the path, then fits its box to the picture, about 20 pixels on the longer side. */
static inline void digits_place(digits_rng *rng, digits_point *path, int n)
{
    float turn = digits_bell(rng, 0.13f), slant = digits_bell(rng, 0.16f), wide = digits_uniform(rng, 0.6f, 1.05f);
    float size = digits_uniform(rng, 15.0f, 20.0f);
    float cx = 13.5f + digits_bell(rng, 1.0f), cy = 13.5f + digits_bell(rng, 1.0f);
    float x0 = 1e9f, y0 = 1e9f, x1 = -1e9f, y1 = -1e9f, scale;
    int i;
    for (i = 0; i < n; i++) {
        float x = wide * path[i].x - slant * path[i].y, y = path[i].y;
        path[i].x = x - turn * y;
        path[i].y = y + turn * x;
        x0 = fminf(x0, path[i].x), x1 = fmaxf(x1, path[i].x);
        y0 = fminf(y0, path[i].y), y1 = fmaxf(y1, path[i].y);
    }
    scale = size / fmaxf(fmaxf(x1 - x0, y1 - y0), 1.0f);
    for (i = 0; i < n; i++) {
        path[i].x = cx + scale * (path[i].x - 0.5f * (x0 + x1));
        path[i].y = cy + scale * (path[i].y - 0.5f * (y0 + y1));
    }
}

/* Lowers `depth` (distance to the ink's edge, negative inside) around the line from a to b, `radius` thick on each
 * side. */
static inline void digits_line(float *depth, digits_point a, digits_point b, float radius, float reach)
{
    float dx = b.x - a.x, dy = b.y - a.y, length2 = fmaxf(dx * dx + dy * dy, 1e-6f);
    int x0 = (int)fmaxf(fminf(a.x, b.x) - reach, 0), x1 = (int)fminf(fmaxf(a.x, b.x) + reach + 1, DIGITS_SIDE - 1);
    int y0 = (int)fmaxf(fminf(a.y, b.y) - reach, 0), y1 = (int)fminf(fmaxf(a.y, b.y) + reach + 1, DIGITS_SIDE - 1);
    int x, y;
    for (y = y0; y <= y1; y++)
        for (x = x0; x <= x1; x++) {
            float px = (float)x - a.x, py = (float)y - a.y;
            float t = fminf(fmaxf((px * dx + py * dy) / length2, 0.0f), 1.0f);
            float ex = px - t * dx, ey = py - t * dy, d = sqrtf(ex * ex + ey * ey) - radius;
            if (d < depth[y * DIGITS_SIDE + x]) depth[y * DIGITS_SIDE + x] = d;
        }
}

/* Draws sample `index` of stream `seed` into 28 x 28 bytes, row after row, and returns its label, 0..9. */
static inline int digits_draw(uint64_t seed, int64_t index, uint8_t *image)
{
    digits_rng rng = digits_seed(seed, index);
    digits_point control[DIGITS_POINTS], path[DIGITS_POINTS * (DIGITS_STEPS + 1)];
    digits_warp warp;
    float depth[DIGITS_PIXELS], radius, taper, soft, ink, grain;
    int label = digits_below(&rng, 10), forms = 0, n, i, gap;

    while (forms < DIGITS_FORMS && digits_form(label, forms)) forms++;
    n = digits_control(&rng, digits_form(label, digits_below(&rng, forms)), 0.30f, control);
    for (i = 0; i < DIGITS_LATTICE * DIGITS_LATTICE; i++) {
        warp.dx[i / DIGITS_LATTICE][i % DIGITS_LATTICE] = digits_bell(&rng, 0.45f);
        warp.dy[i / DIGITS_LATTICE][i % DIGITS_LATTICE] = digits_bell(&rng, 0.45f);
    }
    n = digits_flatten(control, n, &warp, path);
    digits_place(&rng, path, n);

    radius = digits_uniform(&rng, 0.7f, 1.7f);  /* half the width of the pen, in pixels */
    taper  = digits_uniform(&rng, -0.3f, 0.3f); /* it presses harder at the start, or at the end */
    soft   = digits_uniform(&rng, 0.6f, 1.2f);  /* blur: half the width of the edge */
    ink    = digits_uniform(&rng, 190, 255);
    grain  = digits_below(&rng, 4) == 0 ? digits_uniform(&rng, 0, 25) : 0;
    gap    = digits_below(&rng, 8) == 0 ? digits_below(&rng, n) : n; /* the pen skips */

    for (i = 0; i < DIGITS_PIXELS; i++) depth[i] = 1e9f;
    for (i = 0; i + 1 < n; i++) {
        float r = radius * (1 + taper * (2 * (float)i / (float)n - 1));
        if (path[i].stroke == path[i + 1].stroke && i != gap) digits_line(depth, path[i], path[i + 1], r, r + soft);
    }
    for (i = 0; i < DIGITS_PIXELS; i++) {
        float value = ink * fminf(fmaxf(0.5f - 0.5f * depth[i] / soft, 0.0f), 1.0f);
        if (grain > 0) value += digits_bell(&rng, grain);
        image[i] = (uint8_t)fminf(fmaxf(value, 0.0f), 255.0f);
    }
    return label;
}

/* Draws samples first .. first + count - 1: images (count, 28, 28), labels (count). */
static inline void digits_fill(uint64_t seed, int64_t first, int64_t count, uint8_t *images, uint8_t *labels)
{
    int64_t i;
    for (i = 0; i < count; i++) labels[i] = (uint8_t)digits_draw(seed, first + i, images + i * DIGITS_PIXELS);
}

#ifdef HPML_VERSION /* hpml.h is included before this file */
/* Samples 0 .. count - 1 as a dataset: x (784) pixels, y labels. NULL: an error, which is on the context. */
static inline hpml_dataset *digits_dataset(hpml_ctx *ctx, uint64_t seed, int64_t count)
{
    const int64_t pixels = DIGITS_PIXELS;
    uint8_t      *x = (uint8_t *)hpml_ctx_alloc(ctx, (size_t)(count * DIGITS_PIXELS), NULL);
    int32_t      *y = (int32_t *)hpml_ctx_alloc(ctx, (size_t)count * sizeof *y, NULL);
    hpml_dataset *d = NULL;
    int64_t       i;
    for (i = 0; x && y && i < count; i++) y[i] = (int32_t)digits_draw(seed, i, x + i * DIGITS_PIXELS);
    if (x && y) d = hpml_dataset_create(ctx, count, HPML_DTYPE_U8, 1, &pixels, x, HPML_DTYPE_I32, 1, y);
    hpml_ctx_release(ctx, x);
    hpml_ctx_release(ctx, y);
    return d;
}
#endif

#endif /* DIGITS_H */
