/* What you learn: how a matrix product becomes fast on a GPU, one idea at a time. Difficulty 3 of 4.
   nvcc -O3 -arch=native examples/ladder_matmul.cu -lcublas -o ladder && ./ladder [--size N] [--rung N]
   Every rung computes C = A B, all (n, n) and row-major; 2,000 elements are compared with the CPU's, and the time with
   cuBLAS's. Read the rungs in order: each removes a waste of the one before.

   An H100 computes 67 TFLOP/s in f32, 989 in bf16 on tensor cores, and reads 3.3 TB/s from memory. The product needs
   2 n^3 operations on 3 n^2 numbers: for n = 4096 the memory could deliver each number 34 times in the time of the
   arithmetic in f32. All rungs are about reading each number from memory only a few times. */
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <mma.h>
#include <stdio.h>
#include <stdlib.h>
#include "options.h"

#define CHECK(e) if (cudaError_t bad_ = (e)) return fprintf(stderr, "%s: %s\n", #e, cudaGetErrorString(bad_)), 1

/* 1. A thread for each element of C; neighbouring threads have neighbours of a column. Every warp reads 32 different
   rows of A at once: 32 memory transactions instead of one.
   2. Rows and columns exchanged: the threads of a warp have neighbours of a row, so B and C are accessed in whole
   cache lines (coalesced). There are still n^3 reads each of A and B. */
template <bool coalesced> static __global__ void k1_naive(int n, const float *A, const float *B, float *C)
{
    int   x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    int   row = coalesced ? y : x, col = coalesced ? x : y;
    float sum = 0;
    for (int k = 0; k < n; k++) sum += A[(size_t)row * n + k] * B[(size_t)k * n + col];
    C[(size_t)row * n + col] = sum;
}

/* 3. A block keeps a tile of A and of B in shared memory and uses each number TILE times: TILE times fewer reads of
   memory. Now every multiply-add waits for two reads of shared memory. */
#define TILE 32
static __global__ void k3_tiled(int n, const float *A, const float *B, float *C)
{
    __shared__ float a[TILE][TILE], b[TILE][TILE];
    int   x = threadIdx.x, y = threadIdx.y, col = blockIdx.x * TILE + x, row = blockIdx.y * TILE + y;
    float sum = 0;
    for (int k = 0; k < n; k += TILE) {
        a[y][x] = A[(size_t)row * n + k + x];
        b[y][x] = B[(size_t)(k + y) * n + col];
        __syncthreads(); /* the tile is complete */
        for (int i = 0; i < TILE; i++) sum += a[y][i] * b[i][x];
        __syncthreads(); /* no thread reads the tile any more */
    }
    C[(size_t)row * n + col] = sum;
}

/* 4. A thread has 8 x 8 elements in registers: 16 reads of shared memory for 64 multiply-adds. The tile of A is stored
   transposed, so that a thread's 8 rows are neighbours. */
#define BLOCK 128 /* rows and columns of C in a block */
#define DEPTH 8
static __global__ __launch_bounds__(256) void k4_registers(int n, const float *A, const float *B, float *C)
{
    __shared__ float a[DEPTH][BLOCK], b[DEPTH][BLOCK];
    int   t = threadIdx.x, row0 = blockIdx.y * BLOCK, col0 = blockIdx.x * BLOCK, ty = t / 16 * 8, tx = t % 16 * 8;
    float sum[8][8] = {}, x[8], y[8];
    for (int k = 0; k < n; k += DEPTH) {
        for (int i = t; i < BLOCK * DEPTH; i += 256) { /* 1,024 numbers of each, 4 a thread */
            int ar = i / DEPTH, ak = i % DEPTH, bk = i / BLOCK, bc = i % BLOCK;
            a[ak][ar] = A[(size_t)(row0 + ar) * n + k + ak];
            b[bk][bc] = B[(size_t)(k + bk) * n + col0 + bc];
        }
        __syncthreads();
        /* loops of 8 are unrolled: arrays that are indexed by constants are registers */
        for (int d = 0; d < DEPTH; d++) {
            for (int i = 0; i < 8; i++) y[i] = a[d][ty + i], x[i] = b[d][tx + i];
            for (int i = 0; i < 8; i++)
                for (int j = 0; j < 8; j++) sum[i][j] += y[i] * x[j];
        }
        __syncthreads();
    }
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 8; j++) C[(size_t)(row0 + ty + i) * n + col0 + tx + j] = sum[i][j];
}

/* 5. Tensor cores: a warp multiplies 16 x 16 x 16 in one instruction, operands rounded to bf16, sums in f32. 8 warps
   share a tile of 128 x 128, each 64 x 32 of it. Copies that overlap with the computation would be the next rung
   (hpml_cuda.cuh, >>gpu-tiles). */
#define STEP 32
static __global__ __launch_bounds__(256) void k5_tensor_cores(int n, const __nv_bfloat16 *A,
                                                              const __nv_bfloat16 *B, float *C)
{
    using namespace nvcuda::wmma;
    __shared__ __align__(32) __nv_bfloat16 a[BLOCK][STEP + 8], b[STEP][BLOCK + 8]; /* + 8: rows in other banks */
    int t = threadIdx.x, warp = t / 32, row0 = blockIdx.y * BLOCK, col0 = blockIdx.x * BLOCK;
    int wr = warp / 4 * 64, wc = warp % 4 * 32; /* this warp's part of the tile */
    fragment<accumulator, 16, 16, 16, float> sum[4][2];
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 2; j++) fill_fragment(sum[i][j], 0.0f);
    for (int k = 0; k < n; k += STEP) {
        for (int i = t; i < BLOCK * STEP / 8; i += 256) { /* 16 bytes at a time */
            int ar = i / (STEP / 8), ak = i % (STEP / 8) * 8, bk = i / (BLOCK / 8), bc = i % (BLOCK / 8) * 8;
            *(uint4 *)&a[ar][ak] = *(const uint4 *)&A[(size_t)(row0 + ar) * n + k + ak];
            *(uint4 *)&b[bk][bc] = *(const uint4 *)&B[(size_t)(k + bk) * n + col0 + bc];
        }
        __syncthreads();
        for (int d = 0; d < STEP; d += 16) {
            fragment<matrix_a, 16, 16, 16, __nv_bfloat16, row_major> fa[4];
            fragment<matrix_b, 16, 16, 16, __nv_bfloat16, row_major> fb[2];
            for (int i = 0; i < 4; i++) load_matrix_sync(fa[i], &a[wr + 16 * i][d], STEP + 8);
            for (int j = 0; j < 2; j++) load_matrix_sync(fb[j], &b[d][wc + 16 * j], BLOCK + 8);
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 2; j++) mma_sync(sum[i][j], fa[i], fb[j], sum[i][j]);
        }
        __syncthreads();
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 2; j++)
            store_matrix_sync(&C[(size_t)(row0 + wr + 16 * i) * n + col0 + wc + 16 * j], sum[i][j], n, mem_row_major);
}

static __global__ void k_round(const float *x, __nv_bfloat16 *y)
{
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    y[i] = __float2bfloat16_rn(x[i]);
}

typedef struct bench {
    int            n;
    float         *A, *B, *C;
    __nv_bfloat16 *Ah, *Bh;
    cublasHandle_t blas;
} bench;

static const char *const rungs[] = { "naive", "coalesced", "tiled", "registers", "tensor cores",
                                     "cuBLAS f32", "cuBLAS bf16" };

static void run(const bench *b, int rung)
{
    int         n = b->n;
    unsigned    t = n / TILE, w = n / BLOCK;
    const float one = 1, zero = 0;
    switch (rung) {
    case 0: k1_naive<false><<<dim3(t, t), dim3(TILE, TILE)>>>(n, b->A, b->B, b->C); break;
    case 1: k1_naive<true><<<dim3(t, t), dim3(TILE, TILE)>>>(n, b->A, b->B, b->C); break;
    case 2: k3_tiled<<<dim3(t, t), dim3(TILE, TILE)>>>(n, b->A, b->B, b->C); break;
    case 3: k4_registers<<<dim3(w, w), 256>>>(n, b->A, b->B, b->C); break;
    case 4: k5_tensor_cores<<<dim3(w, w), 256>>>(n, b->Ah, b->Bh, b->C); break;
    case 5: cublasSgemm(b->blas, CUBLAS_OP_N, CUBLAS_OP_N, n, n, n, &one, b->B, n, b->A, n, &zero, b->C, n); break;
    default: /* row-major C = A B is column-major C^T = B^T A^T */
        cublasGemmEx(b->blas, CUBLAS_OP_N, CUBLAS_OP_N, n, n, n, &one, b->Bh, CUDA_R_16BF, n, b->Ah, CUDA_R_16BF, n,
                     &zero, b->C, CUDA_R_32F, n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    }
}

/* The largest error of 2,000 elements, relative to the error bound for a sum of this length. */
static double check(const bench *b, const float *A, const float *B, float *C)
{
    double worst = 0;
    size_t n = (size_t)b->n;
    cudaMemcpy(C, b->C, n * n * sizeof(float), cudaMemcpyDeviceToHost);
    for (size_t i = 0; i < 2000; i++) {
        size_t row = i * 7919 % n, col = i * 104729 % n;
        double sum = 0, error;
        for (size_t k = 0; k < n; k++) sum += (double)A[row * n + k] * B[k * n + col];
        error = fabs(sum - C[row * n + col]) / sqrt((double)n);
        if (!(error <= worst)) worst = error;
    }
    return worst;
}

int main(int argc, char **argv)
{
    bench       b = {};
    int64_t     size = 4096, only = 0;
    cudaEvent_t start, stop;
    const option table[] = {
        { "--size", OPTION_COUNT, &size, "N", "rows and columns, at most 32768 (4096)" },
        { "--rung", OPTION_COUNT, &only, "N", "this one alone, 1 to 7 (all)" } };
    int failed = options_read("Times the rungs of the ladder.", table, sizeof table / sizeof *table, argc, argv);
    if (failed) return failed == 1 ? 0 : failed;
    if (size < 1 || size > 32768 || only > 7) return fprintf(stderr, "--size: 1 to 32768; --rung: 1 to 7\n"), 2;
    b.n = (int)(size + BLOCK - 1) / BLOCK * BLOCK; /* whole tiles, so that no rung needs edges */
    size_t count = (size_t)b.n * b.n, bytes = count * sizeof(float);
    float *h[3], **d[2] = { &b.A, &b.B }; /* A, B and C on the host */
    for (int m = 0; m < 3; m++)
        if (!(h[m] = (float *)malloc(bytes))) return fprintf(stderr, "no memory for %zu bytes\n", bytes), 1;
    /* exact in bf16 */
    for (size_t i = 0; i < 2 * count; i++) h[i / count][i % count] = (float)(rand() % 256 - 128) / 128;
    for (int m = 0; m < 2; m++) {
        CHECK(cudaMalloc(d[m], bytes));
        CHECK(cudaMalloc(m ? &b.Bh : &b.Ah, bytes / 2));
        CHECK(cudaMemcpy(*d[m], h[m], bytes, cudaMemcpyHostToDevice));
        k_round<<<count / 256, 256>>>(*d[m], m ? b.Bh : b.Ah);
    }
    CHECK(cudaMalloc(&b.C, bytes));
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&stop));
    if (cublasCreate(&b.blas) != CUBLAS_STATUS_SUCCESS) return fprintf(stderr, "cuBLAS did not start\n"), 1;
    printf("%d x %d\n%-4s %-14s %10s %12s %10s\n", b.n, b.n, "rung", "", "ms", "TFLOP/s", "error");
    for (int rung = 0; rung < 7; rung++) {
        float ms = 0;
        if (only && rung != only - 1) continue;
        CHECK(cudaMemset(b.C, 0xff, bytes));
        run(&b, rung); /* warms up */
        CHECK(cudaEventRecord(start));
        for (int i = 0; i < 5; i++) run(&b, rung);
        CHECK(cudaEventRecord(stop));
        CHECK(cudaEventSynchronize(stop));
        CHECK(cudaGetLastError());
        CHECK(cudaEventElapsedTime(&ms, start, stop));
        double error = check(&b, h[0], h[1], h[2]);
        printf("%-4d %-14s %10.3f %12.2f %10.1e%s\n", rung + 1, rungs[rung], ms / 5, 2e-9 * count * b.n / (ms / 5),
               error, error < 1e-4 ? "" : "  WRONG");
        failed |= !(error < 1e-4);
    }
    return failed;
}
