/* A task for tests of distributed training: points whose class is the index of the largest of their first CLASSES
   coordinates. */
#include <math.h>
#include <stdlib.h>

enum { GLOBAL = 24, INPUTS = 20, CLASSES = 5 };

/* Makes n points. All coordinates of `odd` points, from point `first` on, are `value`. */
static hpml_dataset *points(hpml_ctx *ctx, int64_t n, int64_t first, int64_t odd, float value)
{
    const int64_t shape[1] = { INPUTS };
    float        *x = (float *)malloc(sizeof(float) * (size_t)n * INPUTS);
    int32_t      *y = (int32_t *)calloc((size_t)n, sizeof *y);
    hpml_rng      r = { .seed = 5 };
    hpml_rng_fill_normal(&r, x, n * INPUTS);
    for (int64_t i = 0; i < n; i++)
        for (int k = 1; k < CLASSES; k++)
            if (x[i * INPUTS + k] > x[i * INPUTS + y[i]]) y[i] = k;
    for (int64_t i = 0; i < odd * INPUTS; i++) x[first * INPUTS + i] = value;
    hpml_dataset *d = hpml_dataset_create(ctx, n, HPML_DTYPE_F32, 1, shape, x, HPML_DTYPE_I32, 1, y);
    free(x);
    free(y);
    return d;
}

/* Returns true on rank 0 if all ranks have the same parameters: the largest hash is the smallest one. */
static inline bool same_params(hpml_comm *c)
{
    int64_t hash[2] = { (int64_t)(hpml_param_hash(hpml_comm_ctx(c)) >> 2), 0 };
    hash[1] = -hash[0];
    hpml_allreduce(c, hash, 2, &(hpml_allreduce_desc){ .reduce = HPML_MAX, .element = HPML_ELEMENT_I64 });
    return hash[0] == -hash[1];
}
