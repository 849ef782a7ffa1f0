/* The collectives of hpml_comm.h as a table, with what each computes, for programs that time or check them. Include
   hpml_comm.h before. */
#ifndef HPML_COLLECTIVES_H
#define HPML_COLLECTIVES_H

/* A call of a collective on x (n floats), with y (n floats) where it is not in place. Root is rank 0. */
typedef void call_fn(hpml_comm *c, float *x, float *y, int64_t n, hpml_algorithm a);
static void allreduce(hpml_comm *c, float *x, float *y, int64_t n, hpml_algorithm a)
{
    hpml_allreduce_desc d = { .algorithm = a };
    (void)y;
    hpml_allreduce(c, x, n, &d);
}
static void reduce_scatter(hpml_comm *c, float *x, float *y, int64_t n, hpml_algorithm a)
{
    (void)y, (void)a;
    hpml_reduce_scatter(c, x, n, HPML_ELEMENT_F32, HPML_SUM);
}
static void allgather(hpml_comm *c, float *x, float *y, int64_t n, hpml_algorithm a)
{
    (void)y, (void)a;
    hpml_allgather(c, x, n, HPML_ELEMENT_F32);
}
static void broadcast(hpml_comm *c, float *x, float *y, int64_t n, hpml_algorithm a)
{
    (void)y, (void)a;
    hpml_broadcast(c, x, 4 * (size_t)n, 0);
}
static void reduce(hpml_comm *c, float *x, float *y, int64_t n, hpml_algorithm a)
{
    (void)y, (void)a;
    hpml_reduce_to(c, x, n, HPML_ELEMENT_F32, HPML_SUM, 0);
}
static void gather(hpml_comm *c, float *x, float *y, int64_t n, hpml_algorithm a)
{
    int p = hpml_comm_size(c);
    (void)a;
    hpml_gather(c, x + hpml_comm_rank(c) * (n / p), 4 * (size_t)(n / p), y, 0);
}
static void scatter(hpml_comm *c, float *x, float *y, int64_t n, hpml_algorithm a)
{
    int p = hpml_comm_size(c);
    (void)a;
    hpml_scatter(c, x, 4 * (size_t)(n / p), y, 0);
}
static void all_to_all(hpml_comm *c, float *x, float *y, int64_t n, hpml_algorithm a)
{
    (void)a;
    hpml_all_to_all(c, x, y, 4 * (size_t)(n / hpml_comm_size(c)));
}

/* What element i of the result is on rank r of p. The input is number(r, i); block k of n elements begins at element
   n k / p. */
static float number(int rank, int64_t i) { return (float)((i * 7 + rank * 3) % 11); } /* sums stay exact */
static float sum_of(int p, int64_t i)
{
    float sum = 0;
    for (int r = 0; r < p; r++) sum += number(r, i);
    return sum;
}
typedef enum result { SUM, BLOCK_OF_SUM, BLOCKS, ROOTS, SUM_AT_ROOT, BLOCKS_AT_ROOT, BLOCK_OF_ROOT, TRANSPOSED } result;
typedef struct collective {
    const char *name;
    call_fn    *call;
    result      gives;
    bool        apart;  /* not in place, in blocks of n / p elements */
    int         factor; /* bytes that a rank must send: factor (p - 1) / p times the size; 0: the size */
} collective;
static const collective collectives[] = {
    { "allreduce", allreduce, SUM, false, 2 },          { "reduce_scatter", reduce_scatter, BLOCK_OF_SUM, false, 1 },
    { "allgather", allgather, BLOCKS, false, 1 },       { "broadcast", broadcast, ROOTS, false, 0 },
    { "reduce", reduce, SUM_AT_ROOT, false, 0 },        { "gather", gather, BLOCKS_AT_ROOT, true, 1 },
    { "scatter", scatter, BLOCK_OF_ROOT, true, 1 },     { "all_to_all", all_to_all, TRANSPOSED, true, 1 } };

/* True if element i of the n results on this rank is right, or not part of the result. */
static bool is_right(const collective *k, hpml_comm *c, const float *x, const float *y, int64_t n, int64_t i)
{
    const int     p = hpml_comm_size(c), me = hpml_comm_rank(c);
    const int64_t each = n / p; /* of the blocks of gather, scatter and all_to_all */
    int           owner = 0;
    while (i >= hpml_block(n, p, owner + 1)) owner++;
    switch (k->gives) {
    case SUM: return x[i] == sum_of(p, i);
    case BLOCK_OF_SUM: return owner != me || x[i] == sum_of(p, i);
    case BLOCKS: return x[i] == number(owner, i);
    case ROOTS: return x[i] == number(0, i);
    case SUM_AT_ROOT: return me != 0 || x[i] == sum_of(p, i);
    case BLOCKS_AT_ROOT: return me != 0 || i >= each * p || y[i] == number((int)(i / each), i);
    case BLOCK_OF_ROOT: return i >= each || y[i] == number(0, me * each + i);
    case TRANSPOSED: return i >= each * p || y[i] == number((int)(i / each), me * each + i % each);
    }
    return false;
}

#endif
