/* What you learn: the digit classifier on all GPUs of one machine or many: one rank for each GPU, gradients reduced by
   NCCL. Difficulty 3 of 4.
   nvcc -O2 -arch=native -DHPML_USE_NCCL examples/12_nccl_data_parallel.cu -lcublasLt -lcudnn -o nccl
   ./nccl     (one thread for each GPU; first one GPU, then all; --help lists the options)
   With MPI, one process for each GPU: nvcc -ccbin mpicxx -DHPML_USE_MPI ... -o nccl && mpiexec -n 8 ./nccl
   prints accuracy and samples per second for 1 and for N GPUs. */
#define HPML_IMPLEMENTATION
#include "../hpml_comm.h" /* before hpml_cuda.cuh, so that it declares hpml_nccl_attach */
#include "../hpml_cuda.cuh"
#include "digits.h"
#include "options.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

struct options {
    int64_t        gpus, batch, epochs; /* batch: samples of a step, for each GPU */
    int            onebit;
    hpml_cuda_desc gpu[64];
    double         accuracy, rate; /* results of rank 0 */
};

/* Called for each rank before its context is created: chooses a GPU for the rank. */
static void place(hpml_ctx_desc *ctx, int rank, void *user)
{
    options        *o   = (options *)user;
    hpml_cuda_desc *gpu = &o->gpu[rank % 64];
    int             n   = hpml_cuda_device_count();
    gpu->device       = n > 0 ? rank % n : 0; /* without a GPU the context has an error */
    gpu->precision    = HPML_CUDA_BF16;
    ctx->backend      = hpml_backend_cuda();
    ctx->backend_desc = gpu;
}

/* Every rank generates all digits; hpml_distribute gives each rank its share of them. */
static hpml_dataset *digits(hpml_ctx *ctx, uint64_t seed, int64_t count)
{
    const int64_t        shape[3] = { 1, DIGITS_SIDE, DIGITS_SIDE };
    std::vector<uint8_t> image((size_t)(count * DIGITS_PIXELS)), label((size_t)count);
    digits_fill(seed, 0, count, image.data(), label.data());
    std::vector<int32_t> y(label.begin(), label.end());
    return hpml_dataset_create(ctx, count, HPML_DTYPE_U8, 3, shape, image.data(), HPML_DTYPE_I32, 1, y.data());
}

static hpml_tensor *model(hpml_tensor *x) /* (B, 1, 28, 28) -> (B, 10) */
{
    hpml_conv2d_desc conv = {};
    hpml_linear_desc relu = {};
    conv.kernel_h = 5, conv.padding_h = 2, conv.activation = relu.activation = HPML_ACT_RELU;
    x = hpml_max_pool2d(hpml_conv2d(x, 32, &conv), 2, 0, 0);
    x = hpml_max_pool2d(hpml_conv2d(x, 64, &conv), 2, 0, 0);
    return hpml_linear(hpml_linear(hpml_flatten(x), 256, &relu), 10, NULL);
}

static hpml_status train(hpml_comm *comm, void *user)
{
    options             *o    = (options *)user;
    hpml_ctx            *ctx  = hpml_comm_ctx(comm);
    int                  p    = hpml_comm_size(comm), rank = hpml_comm_rank(comm);
    hpml_dataset        *data = digits(ctx, 1, 24000), *test = digits(ctx, 2, 4000);
    hpml_trainer_desc    d    = {};
    hpml_plan            how  = {};
    hpml_metrics         m    = {};
    char                 line[1024];
    if (hpml_nccl_attach(comm, NULL) != HPML_OK) return hpml_ctx_status(ctx); /* else through host memory */
    d.input         = hpml_input_4d(ctx, o->batch, 1, DIGITS_SIDE, DIGITS_SIDE);
    d.output        = model(d.input);
    d.lr            = 0.05f;
    d.momentum      = 0.9f;
    d.lr_rule       = HPML_LR_SQRT; /* a step has p times as many samples */
    d.lr_base_batch = o->batch;
    how.codec.kind  = o->onebit ? HPML_CODEC_ONEBIT : HPML_CODEC_NONE;
    hpml_trainer     *t    = hpml_trainer_create(ctx, &d);
    hpml_distributed *dist = hpml_distribute(t, comm, &how);
    double seconds = 0;
    for (int64_t e = 0; e < o->epochs && dist; e++) {
        double start = hpml_now();
        if (hpml_trainer_fit(t, data, NULL) != HPML_OK) break;
        if (e > 0 || o->epochs == 1) seconds += hpml_now() - start; /* the first pass warms up */
    }
    if (hpml_trainer_evaluate(t, test, &m) != HPML_OK || rank != 0) return hpml_ctx_status(ctx);
    int64_t timed = o->epochs > 1 ? o->epochs - 1 : 1;
    o->accuracy = m.accuracy, o->rate = (double)(24000 * timed) / seconds;
    hpml_distribute_text(dist, line, sizeof line);
    printf("%2d GPUs: accuracy %.2f %%, %.0f samples/s\n    %s\n", p, 100 * o->accuracy, o->rate, line);
    hpml_cuda_text(ctx, line, sizeof line);
    printf("    rank 0: %s\n", line);
    return hpml_ctx_status(ctx);
}

int main(int argc, char **argv)
{
    static options   o;
    hpml_launch_desc l = {};
    char             error[768];
    o.gpus = hpml_cuda_device_count(), o.batch = 128, o.epochs = 4;
    const option table[] = {
        { "--gpus", OPTION_COUNT, &o.gpus, "N", "ranks, one for each GPU (all GPUs)" },
        { "--batch", OPTION_COUNT, &o.batch, "N", "samples of a step on each GPU (128)" },
        { "--epochs", OPTION_COUNT, &o.epochs, "N", "passes over the data (4)" },
        { "--onebit", OPTION_FLAG, &o.onebit, NULL, "gradients of 1 bit" } };
    int failed = options_read("Data-parallel training on all GPUs, gradients reduced by NCCL.", table,
                              sizeof table / sizeof *table, argc, argv);
    if (failed) return failed == 1 ? 0 : failed;
    l.place = place;
#ifdef HPML_USE_MPI
    l.transport = HPML_TRANSPORT_MPI; /* mpiexec sets the number of ranks */
#else
    l.ranks = 1;
    if (o.gpus > 1 && hpml_launch(&l, train, &o, error, sizeof error) != HPML_OK)
        return fprintf(stderr, "error: %s\n", error), 1;
    double alone = o.rate;
    l.ranks      = o.gpus > 0 ? (int32_t)o.gpus : 1;
#endif
    if (hpml_launch(&l, train, &o, error, sizeof error) != HPML_OK) return fprintf(stderr, "error: %s\n", error), 1;
#ifndef HPML_USE_MPI
    if (alone > 0) printf("%lld GPUs are %.2f times as fast as one\n", (long long)o.gpus, o.rate / alone);
#endif
    return 0;
}
