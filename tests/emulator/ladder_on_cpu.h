/* All of examples/ladder_matmul.cu on a CPU, for test_cuda.sh, which turns its launches into those of cuda_on_cpu.h:
   what the ladder takes from mma.h (here every lane has the whole of a fragment) and from cuBLAS. */
#ifndef LADDER_ON_CPU_H
#define LADDER_ON_CPU_H
#include "hopper_on_cpu.h"

namespace nvcuda {
namespace wmma {
struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
enum layout { mem_row_major };
template <class use, int m, int n, int k, class T, class order = row_major> struct fragment { float x[16][16]; };
template <class F> inline void fill_fragment(F &f, float v)
{
    for (auto &row : f.x) std::fill(row, row + 16, v);
}
template <class F> inline void load_matrix_sync(F &f, const __nv_bfloat16 *from, unsigned pitch)
{
    if ((uintptr_t)from % 32 || pitch % 8) emu::error("load_matrix_sync: from %p, %u", (const void *)from, pitch);
    for (unsigned i = 0; i < 256; i++) f.x[i / 16][i % 16] = __bfloat162float(from[i / 16 * pitch + i % 16]);
}
template <class D, class A, class B> inline void mma_sync(D &d, const A &a, const B &b, const D &c)
{
    D sum = c;
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < 16; k++)
            for (int j = 0; j < 16; j++) sum.x[i][j] += a.x[i][k] * b.x[k][j];
    d = sum;
}
template <class D> inline void store_matrix_sync(float *to, const D &d, int pitch, layout)
{
    for (unsigned i = emu::lane(); i < 256; i += 32) to[i / 16 * (size_t)pitch + i % 16] = d.x[i / 16][i % 16];
}
} // namespace wmma
} // namespace nvcuda

typedef int *cublasHandle_t;
enum { CUBLAS_STATUS_SUCCESS, CUBLAS_OP_N = 0, CUDA_R_32F = 0, CUDA_R_16BF = 14, CUBLAS_COMPUTE_32F = 68,
       CUBLAS_GEMM_DEFAULT = -1 };
inline int cublasCreate(cublasHandle_t *) { return CUBLAS_STATUS_SUCCESS; }
/* C (n, m) = B (n, k) A (k, m), row-major, of square matrices without gaps. */
inline void cublasGemmEx(cublasHandle_t, int, int, int m, int n, int k, const float *, const void *A, int type, int,
                         const void *B, int, int, const float *, void *C, int, int, int, int)
{
    auto at = [type](const void *x, size_t i) {
        if (type == CUDA_R_32F) return static_cast<const float *>(x)[i];
        return __bfloat162float(static_cast<const __nv_bfloat16 *>(x)[i]);
    };
    for (size_t i = 0; i < (size_t)n * (size_t)m; i++) {
        size_t row = i / (size_t)m, column = i % (size_t)m;
        double sum = 0;
        for (size_t l = 0; l < (size_t)k; l++)
            sum += (double)at(B, row * (size_t)k + l) * (double)at(A, l * (size_t)m + column);
        static_cast<float *>(C)[i] = (float)sum;
    }
}
inline void cublasSgemm(cublasHandle_t h, int, int, int m, int n, int k, const float *one, const float *A, int lda,
                        const float *B, int ldb, const float *zero, float *C, int ldc)
{
    cublasGemmEx(h, 0, 0, m, n, k, one, A, CUDA_R_32F, lda, B, CUDA_R_32F, ldb, zero, C, CUDA_R_32F, ldc, 0, 0);
}
inline cudaError_t cudaMemcpyFromSymbol(void *to, const int &from, size_t bytes)
{
    memcpy(to, &from, bytes);
    return cudaSuccess;
}
#endif
