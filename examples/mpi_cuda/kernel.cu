/* The part of examples/mpi_cuda that nvcc compiles: a gradient by kernels of the program's own; see main.c. Nothing of
   hpml is needed here. */
#include "kernel.h"
#include <cuda_runtime.h>

enum { THREADS = 256 };

/* Random numbers in [-1, 1) by a hash of their index, so that samples need no memory. */
__device__ static float noise(unsigned a, unsigned b)
{
    unsigned h = a * 0x9e3779b1u + b * 0x85ebca77u;
    h = (h ^ (h >> 15)) * 0x2c1b3c6du;
    h = (h ^ (h >> 12)) * 0x297a2d39u;
    h ^= h >> 15;
    return (float)(h >> 8) / 8388608.0f - 1;
}

/* error[s] = w x_s - y_s, with y_s = x_s (1, 1/2, 1/3, ...) for sample s; one thread a sample. */
__global__ static void residuals(const float *w, float *error, unsigned first)
{
    unsigned s = blockIdx.x * blockDim.x + threadIdx.x;
    float    sum = 0;
    if (s >= SAMPLES) return;
    for (unsigned i = 0; i < WEIGHTS; i++) sum += (w[i] - 1.0f / (float)(i + 1)) * noise(first + s, i);
    error[s] = sum;
}

/* grad[i] = mean over samples of 2 error_s x_s[i]; one thread a weight. */
__global__ static void gradients(const float *error, float *grad, unsigned first)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    float    sum = 0;
    if (i >= WEIGHTS) return;
    for (unsigned s = 0; s < SAMPLES; s++) sum += 2 * error[s] * noise(first + s, i);
    grad[i] = sum / SAMPLES;
}

static float *device_w, *device_error, *device_grad; /* (WEIGHTS), (SAMPLES), (WEIGHTS) on the GPU */

extern "C" const char *gpu_open(int rank)
{
    int         count = 0;
    cudaError_t e = cudaGetDeviceCount(&count);
    if (e == cudaSuccess && count == 0) e = cudaErrorNoDevice;
    if (e == cudaSuccess) e = cudaSetDevice(rank % count);
    if (e == cudaSuccess) e = cudaMalloc((void **)&device_w, sizeof(float) * WEIGHTS);
    if (e == cudaSuccess) e = cudaMalloc((void **)&device_error, sizeof(float) * SAMPLES);
    if (e == cudaSuccess) e = cudaMalloc((void **)&device_grad, sizeof(float) * WEIGHTS);
    return e == cudaSuccess ? NULL : cudaGetErrorString(e);
}

extern "C" const char *gpu_gradient(const float *w, float *grad, double *loss, int rank, int step)
{
    static float error[SAMPLES];
    unsigned     first = (unsigned)(rank * 1000003 + step * SAMPLES);
    cudaError_t  e = cudaMemcpy(device_w, w, sizeof(float) * WEIGHTS, cudaMemcpyHostToDevice);
    residuals<<<(SAMPLES + THREADS - 1) / THREADS, THREADS>>>(device_w, device_error, first);
    gradients<<<(WEIGHTS + THREADS - 1) / THREADS, THREADS>>>(device_error, device_grad, first);
    if (e == cudaSuccess) e = cudaMemcpy(grad, device_grad, sizeof(float) * WEIGHTS, cudaMemcpyDeviceToHost);
    if (e == cudaSuccess) e = cudaMemcpy(error, device_error, sizeof error, cudaMemcpyDeviceToHost);
    *loss = 0;
    for (int s = 0; s < SAMPLES; s++) *loss += (double)error[s] * error[s] / SAMPLES;
    return e == cudaSuccess ? NULL : cudaGetErrorString(e);
}

extern "C" void gpu_close(void)
{
    cudaFree(device_w);
    cudaFree(device_error);
    cudaFree(device_grad);
}
