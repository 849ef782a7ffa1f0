/* What you learn: 1-bit gradients in a program that has its own model and its own MPI. Difficulty 2 of 4.
   mpicc -O2 -DHPML_USE_MPI examples/06_onebit_dropin.c -o dropin -lm -lpthread && mpiexec -n 2 ./dropin
   cc -O2 examples/06_onebit_dropin.c -o dropin -lm -lpthread && ./dropin      (without MPI: 4 threads play the ranks)
   prints the loss of a hand-written logistic regression, first with MPI_Allreduce (or a plain sum), then with 1 bit for
   each number, and how many bytes each rank has sent.

   BEFORE                                                    AFTER: the five lines marked with a number
       MPI_Allreduce(MPI_IN_PLACE, grad, n, MPI_FLOAT,           hpml_exchange_run(x);
                     MPI_SUM, MPI_COMM_WORLD);
*/
#define HPML_IMPLEMENTATION
#include "../hpml_comm.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef HPML_USE_MPI
#include <mpi.h>
#endif

enum { CLASSES = 10, FEATURES = 500, SAMPLES = 600, STEPS = 60 };

/* The program's own code: softmax regression on points around ten centres, gradient (CLASSES, FEATURES) by hand. */
static double gradient(const float *w, float *grad, int rank, int step)
{
    static const float spread = 1.5f;
    hpml_rng           rng = { .seed = 7, .stream = (uint64_t)(rank * STEPS + step) };
    float             *x = (float *)malloc(sizeof(float) * FEATURES);
    double             loss = 0;
    memset(grad, 0, sizeof(float) * CLASSES * FEATURES);
    for (int s = 0; s < SAMPLES / 20; s++) {
        int    label = (int)hpml_rng_below(&rng, CLASSES), centre = label * 37 % FEATURES;
        double y[CLASSES], sum = 0;
        hpml_rng_fill_normal(&rng, x, FEATURES);
        for (int i = 0; i < 40; i++) x[(centre + i) % FEATURES] += spread;
        for (int c = 0; c < CLASSES; c++) {
            y[c] = 0;
            for (int i = 0; i < FEATURES; i++) y[c] += (double)w[c * FEATURES + i] * (double)x[i];
        }
        for (int c = 0; c < CLASSES; c++) sum += exp(y[c]);
        loss += log(sum) - y[label];
        for (int c = 0; c < CLASSES; c++) {
            float d = (float)(exp(y[c]) / sum - (c == label));
            for (int i = 0; i < FEATURES; i++) grad[c * FEATURES + i] += d * x[i] * 20.0f / SAMPLES;
        }
    }
    free(x);
    return loss * 20 / SAMPLES;
}

static hpml_status train(hpml_comm *comm, hpml_codec_kind codec)
{
    float        *w = (float *)calloc(CLASSES * FEATURES, sizeof *w);
    float        *grad = (float *)calloc(CLASSES * FEATURES, sizeof *grad);
    double        first = 0, last = 0;
    hpml_counters sent;
    hpml_gradient  g = { "w", grad, CLASSES, FEATURES };                                                        /* 3 */
    hpml_exchange *x = hpml_exchange_create(comm, &(hpml_exchange_desc){ .count = 1, .tensors = &g, .codec.kind = codec,
                                            .reduce = HPML_MEAN });                                             /* 4 */
    hpml_comm_counters_reset(comm);
    for (int step = 0; step < STEPS; step++) {
        last = gradient(w, grad, hpml_comm_rank(comm), step);
        if (step == 0) first = last;
        if (hpml_exchange_run(x) != HPML_OK) break;                                                             /* 5 */
        for (int i = 0; i < CLASSES * FEATURES; i++) w[i] -= 0.1f * grad[i];
    }
    hpml_comm_counters(comm, &sent);
    if (hpml_comm_rank(comm) == 0)
        printf("%-7s %d ranks (%s): loss %.4f -> %.4f, each rank sent %lld bytes\n", hpml_codec_get(codec)->name,
               hpml_comm_size(comm), hpml_comm_transport(comm), first, last, (long long)sent.bytes);
    free(w);
    free(grad);
    return hpml_ctx_status(hpml_comm_ctx(comm));
}

static hpml_status both(hpml_comm *comm, void *user)
{
    (void)user;
    hpml_status status = train(comm, HPML_CODEC_NONE);
    return status == HPML_OK ? train(comm, HPML_CODEC_ONEBIT) : status;
}

#ifdef HPML_USE_MPI
int main(int argc, char **argv)
{
    int level;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level); /* the program had this already */
    hpml_ctx  *ctx  = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1 });                                        /* 1 */
    hpml_comm *comm = hpml_comm_create(ctx, &(hpml_comm_desc){ .transport = HPML_TRANSPORT_MPI });              /* 2 */
    if (comm) both(comm, NULL);
    int failed = hpml_ctx_status(ctx) != HPML_OK;
    if (failed) fprintf(stderr, "error: %s\n", hpml_ctx_error(ctx));
    hpml_ctx_free(ctx); /* before MPI_Finalize */
    MPI_Finalize();
    return failed;
}
#else
int main(void)
{
    char        error[512];
    hpml_status status = hpml_launch(&(hpml_launch_desc){ .ranks = 4 }, both, NULL, error, sizeof error);
    if (status != HPML_OK) fprintf(stderr, "error: %s\n", error);
    return status != HPML_OK;
}
#endif
