/* Functions for a device (hpml_custom.kernel) of the op y = x |x|, for test_cuda.c: compiled with hpml_cuda.cuh's body,
   by nvcc or for the emulation, whose launches are spelled HPMLG_LAUNCH. f32 only. */
static __global__ void own_kernel(float *y, const float *x, float *dx, const float *dy, int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float size = x[i] < 0 ? -x[i] : x[i];
    if (y) y[i] = x[i] * size;
    if (dx) dx[i] += 2 * size * dy[i];
}
extern "C" hpml_status own_kernel_forward(const hpml_run *run, hpml_node *n)
{
    int64_t count = hpml_tensor_count(n->out);
    HPMLG_LAUNCH(own_kernel, (unsigned)(count + 255) / 256, 256, 0, (cudaStream_t)hpml_cuda_stream(run->ctx),
                 n->out->data, n->src[0]->data, (float *)nullptr, (const float *)nullptr, count);
    return cudaGetLastError() == cudaSuccess ? HPML_OK : HPML_ERR_CUDA;
}
extern "C" hpml_status own_kernel_backward(const hpml_run *run, hpml_node *n)
{
    int64_t count = hpml_tensor_count(n->out);
    HPMLG_LAUNCH(own_kernel, (unsigned)(count + 255) / 256, 256, 0, (cudaStream_t)hpml_cuda_stream(run->ctx),
                 (float *)nullptr, n->src[0]->data, n->src[0]->grad, n->out->grad, count);
    return cudaGetLastError() == cudaSuccess ? HPML_OK : HPML_ERR_CUDA;
}
