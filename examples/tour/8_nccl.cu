/* A tour of arrays of your own on several GPUs: NCCL without a model. Difficulty 3 of 4.
   nvcc -O2 -std=c++17 -arch=native -DHPML_USE_NCCL examples/tour/8_nccl.cu -lcublasLt -lcudnn -o nccl && ./nccl
   A thread for each GPU: a buffer that the library did not allocate is averaged over all GPUs, in the order of the
   context's stream. prints a line for each GPU; without a GPU the reason, and exits with 77. Not yet run on GPUs. */
#define HPML_IMPLEMENTATION
#include "../../hpml_cuda.cuh"
#include <cuda_runtime.h>
#include <stdio.h>
#include <thread>
#include <vector>

enum { COUNT = 1 << 20, MOST = 64 };

static void rank_main(int rank, int ranks, double *mean)
{
    hpml_cuda_desc gpu  = {};
    hpml_ctx_desc  desc = {};
    hpml_nccl_desc nccl = {};
    float         *x    = NULL, first = 0; /* (COUNT) on the GPU */
    gpu.device        = rank;
    desc.backend      = hpml_backend_cuda();
    desc.backend_desc = &gpu;
    desc.log          = hpml_log_stderr;
    nccl.rank         = rank;
    nccl.ranks        = ranks;
    nccl.file         = "build/nccl_meeting";
    hpml_ctx    *ctx    = hpml_ctx_create(&desc);
    hpml_nccl   *n      = hpml_nccl_create(ctx, &nccl); /* waits for the other ranks */
    cudaStream_t stream = (cudaStream_t)hpml_cuda_stream(ctx);
    cudaSetDevice(rank);
    if (n && cudaMalloc((void **)&x, COUNT * sizeof(float)) == cudaSuccess) {
        std::vector<float> host(COUNT, (float)rank);
        cudaMemcpyAsync(x, host.data(), COUNT * sizeof(float), cudaMemcpyHostToDevice, stream);
        hpml_nccl_allreduce(n, x, COUNT, true); /* behind the copy on the stream; the host goes on */
        cudaMemcpyAsync(&first, x, sizeof first, cudaMemcpyDeviceToHost, stream);
        cudaStreamSynchronize(stream);
    }
    *mean = hpml_ctx_status(ctx) == HPML_OK ? (double)first : -1;
    cudaFree(x);
    hpml_nccl_free(n);
    hpml_ctx_free(ctx);
}

int main(void)
{
    int    ranks = hpml_cuda_device_count(), failed = 0;
    double mean[MOST] = {};
    if (ranks == 0) return printf("SKIP: no GPU\n"), 77;
    if (ranks > MOST) ranks = MOST;
    std::vector<std::thread> threads;
    for (int r = 0; r < ranks; r++) threads.emplace_back(rank_main, r, ranks, &mean[r]);
    for (std::thread &t : threads) t.join();
    for (int r = 0; r < ranks; r++) {
        printf("GPU %d: mean %g, expected %g\n", r, mean[r], (ranks - 1) / 2.0);
        failed |= mean[r] != (ranks - 1) / 2.0;
    }
    return failed;
}
