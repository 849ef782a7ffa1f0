/* A tour of 1-bit gradients of your own on several GPUs: no model, no trainer, no memory of the library. Difficulty 3
   of 4.
   nvcc -O2 -std=c++17 -arch=native -DHPML_USE_NCCL examples/tour/9_own_gradients.cu -lcublasLt -lcudnn -o own && ./own
   A thread for each GPU: a program that has gradients on its GPU, in an array and on a stream of its own, averages them
   over all GPUs, with 1 bit for each number and error feedback, as 06_onebit_dropin.c does in host memory. prints the
   error of the mean over 50 steps, which error feedback makes small, and the bytes that a GPU sends for each number;
   exits with 1 if that error is large; without a GPU the reason, and exits with 77. Not yet run on GPUs. */
#define HPML_IMPLEMENTATION
#include "../../hpml_comm.h" /* before hpml_cuda.cuh, so that it declares hpml_nccl_attach */
#include "../../hpml_cuda.cuh"
#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>
#include <vector>

enum { ROWS = 32, COLS = 256, COUNT = ROWS * COLS, STEPS = 50 };

/* In place of the gradient that kernels of your own compute: random numbers from 0 to 2. */
static float gradient(int rank, int step, int i)
{
    unsigned h = (unsigned)i * 0x9e3779b1u + (unsigned)(rank * 1000 + step) * 0x85ebca77u;
    h = (h ^ (h >> 15)) * 0x2c1b3c6du;
    return (float)((h ^ (h >> 13)) >> 8) / 8388608.0f;
}

static void place(hpml_ctx_desc *ctx, int rank, void *user)
{
    hpml_cuda_desc *gpu = (hpml_cuda_desc *)user + rank;
    gpu->device       = rank;
    ctx->backend      = hpml_backend_cuda();
    ctx->backend_desc = gpu;
    ctx->log          = hpml_log_stderr;
}

static hpml_status rank_main(hpml_comm *comm, void *)
{
    hpml_ctx     *ctx    = hpml_comm_ctx(comm);
    cudaStream_t  theirs = (cudaStream_t)hpml_cuda_stream(ctx), mine;
    cudaEvent_t   ready, done;
    float        *grad = NULL; /* (ROWS, COLS) on the GPU */
    double        worst = 0;
    int           rank = hpml_comm_rank(comm), ranks = hpml_comm_size(comm);
    hpml_counters sent = {};
    if (hpml_nccl_attach(comm, NULL) != HPML_OK) return hpml_ctx_status(ctx);
    cudaSetDevice(rank);
    cudaStreamCreate(&mine);
    cudaEventCreate(&ready);
    cudaEventCreate(&done);
    if (cudaMalloc((void **)&grad, COUNT * sizeof(float)) != cudaSuccess)
        return hpml_ctx_fail(ctx, HPML_ERR_CUDA, "no memory for the gradient");
    hpml_gradient      g = { "gradient", grad, ROWS, COLS };
    hpml_exchange_desc d = {};
    d.count = 1, d.tensors = &g, d.codec.kind = HPML_CODEC_ONEBIT, d.reduce = HPML_MEAN, d.on_device = true;
    hpml_exchange     *exchange = hpml_exchange_create(comm, &d);
    std::vector<float> host(COUNT), sum(COUNT), exact(COUNT);
    for (int step = 0; step < STEPS && exchange; step++) {
        for (int i = 0; i < COUNT; i++) host[i] = gradient(rank, step, i);
        cudaMemcpyAsync(grad, host.data(), COUNT * sizeof(float), cudaMemcpyHostToDevice, mine); /* your kernels */
        cudaEventRecord(ready, mine);
        cudaStreamWaitEvent(theirs, ready, 0);              /* 1. the exchange comes after your stream's work */
        if (hpml_exchange_run(exchange) != HPML_OK) break;  /* 2. grad becomes the mean over all GPUs */
        cudaEventRecord(done, theirs);
        cudaStreamWaitEvent(mine, done, 0);                 /* 3. your stream goes on after it */
        cudaMemcpyAsync(host.data(), grad, COUNT * sizeof(float), cudaMemcpyDeviceToHost, mine); /* your update */
        cudaStreamSynchronize(mine);
        for (int i = 0; i < COUNT; i++) sum[i] += host[i];
        for (int r = 0; r < ranks; r++)
            for (int i = 0; i < COUNT; i++) exact[i] += gradient(r, step, i) / (float)ranks;
    }
    for (int i = 0; i < COUNT; i++) worst = fmax(worst, fabs((double)sum[i] - exact[i]) / STEPS);
    hpml_comm_counters(comm, &sent);
    if (rank == 0)
        printf("%d GPUs: the mean of %d steps has errors up to %.3f, %.3f bytes sent for each number\n", ranks, STEPS,
               worst, (double)sent.bytes / COUNT / STEPS);
    hpml_exchange_free(exchange);
    cudaFree(grad);
    cudaEventDestroy(ready);
    cudaEventDestroy(done);
    cudaStreamDestroy(mine);
    if (!(worst < 0.2)) hpml_ctx_fail(ctx, HPML_ERR_STATE, "the mean is wrong by %.3f, expected below 0.2", worst);
    return hpml_ctx_status(ctx);
}

int main(void)
{
    hpml_cuda_desc   gpu[64] = {};
    hpml_launch_desc launch  = {};
    launch.ranks = hpml_cuda_device_count(), launch.place = place;
    if (launch.ranks == 0) return printf("SKIP: no GPU\n"), 77;
    if (launch.ranks > 64) launch.ranks = 64;
    return hpml_launch(&launch, rank_main, gpu, NULL, 0) != HPML_OK;
}
