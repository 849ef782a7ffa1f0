/* What you learn: how a matrix product becomes fast on a GPU, one idea at a time. Difficulty 3 of 4.
   nvcc -O3 -arch=native examples/ladder_matmul.cu -lcublas -o ladder && ./ladder [--size N] [--rung N]
   Rung 6 is for an H100 or H200 and needs -arch=sm_90a in place of -arch=native. CUDA 12 or later.
   Every rung computes C = A B, all (n, n) and row-major; 2,000 elements are compared with the CPU's, and the time with
   cuBLAS's. Read the rungs in order: each removes a waste of the one before.

   An H100 computes 67 TFLOP/s in f32, 989 in bf16 on tensor cores, and reads 3.3 TB/s from memory. The product needs
   2 n^3 operations on 3 n^2 numbers: for n = 4096 the memory could deliver each number 34 times in the time of the
   arithmetic in f32. All rungs are about reading each number from memory only a few times. */
#include "hopper.h"
#ifndef HPML_CUDA_ON_CPU /* a test runs rung 6 on a CPU, with functions of its own in place of PTX instructions */
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
   share a tile of 128 x 128, each 64 x 32 of it. Nothing is copied while they compute: hpml_cuda.cuh, >>gpu-tiles,
   overlaps the two with cp.async. */
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

#endif

/* 6. Hopper. Tensor cores that read tiles from shared memory by themselves (wgmma), and an engine that copies tiles
   there (TMA). The limit is operations over peak: 2 n^3 over 989 TFLOP/s, 0.139 ms for n = 4096. The warps of rung 5
   load every fragment into registers before mma.sync multiplies it, and reach about 60 % of the peak at best. Here one
   instruction of 128 threads, a warpgroup, multiplies 64 x 256 x 16, and no thread touches A or B.

   A block has three warpgroups. One thread of the first is the producer: it starts copies, 4 stages ahead. The other
   two warpgroups, the consumers, multiply: each 64 of the tile's 128 rows with all 256 columns, its sums in 128
   registers of each thread. A stage is a tile of A, 128 x 64, and one of B, 64 x 256: 48 KiB.

       memory --TMA--> [stage 0]  [stage 1]  [stage 2]  [stage 3] --wgmma--> registers --> C
                        full[0]    full[1]    full[2]    full[3]   complete: its 48 KiB are there, to be multiplied
                        empty[0]   empty[1]   empty[2]   empty[3]  complete: 8 warps have read it, it may be filled

       producer   | fill 0 | fill 1 | fill 2 | fill 3 | wait for empty[0] | fill 0 | wait for empty[1] | fill 1 ...
       consumers  | wait for full[0] | multiply 0 | wait for full[1] | multiply 1, free 0 | wait for full[2] ...

   Each barrier is used once in a round of the ring. Its phases have parity 0, 1, 0, ...: in round r the
   consumers wait for parity r & 1 of full[s], the producer for the phase before, (r & 1) ^ 1, of empty[s]. A new
   barrier counts as one whose phase of parity 1 is complete, so that the first round waits for no consumer.

   The swizzle. A row of a stage is 128 bytes, eight pieces of 16 bytes, and covers all 32 banks. wgmma reads the same
   piece of eight rows at once: stored as they are, these lie in the same four banks, and it would take eight turns. So
   TMA stores piece p of row r at place p ^ (r % 8), and wgmma, whose descriptor names the swizzle, finds it there:

       place    0 1 2 3 4 5 6 7          place    0 1 2 3 4 5 6 7
       row 0    0 1 2 3 4 5 6 7          row 4    4 5 6 7 0 1 2 3
       row 1    1 0 3 2 5 4 7 6          row 5    5 4 7 6 1 0 3 2
       row 2    2 3 0 1 6 7 4 5          row 6    6 7 4 5 2 3 0 1
       row 3    3 2 1 0 7 6 5 4          row 7    7 6 5 4 3 2 1 0     every piece is once in each place

   A block takes one tile after another, and the producer fills the ring for the next tile while the consumers store
   this one. Next would be: clusters whose blocks share tiles (multicast), and TMA for the stores. */
#define TILE_M 128
#define TILE_N 256
#define TILE_K 64 /* numbers of bf16 in 128 bytes, the width of the swizzle */
#define STAGES 4 /* at least 2, because a stage is free one step after its own */
#define BAND 16 /* rows of tiles that are computed together: 132 blocks then cover a square of C and read the least */
#define A_BYTES (TILE_M * TILE_K * 2)
#define BOX_BYTES (TILE_K * 64 * 2) /* B's tile is four boxes of 64 columns */
#define STAGE_BYTES (A_BYTES + 4 * BOX_BYTES)
#define RING_BYTES (STAGES * (STAGE_BYTES + 2 * 8))

#if !defined __CUDA_ARCH__ || defined __CUDA_ARCH_FEAT_SM90_ALL
static __device__ int k6_compiled = 1;

/* Row and column of a tile's first element. Bands of 16 rows of tiles, and in a band column after column. */
static __device__ int2 tile_corner(int tile, int rows, int columns)
{
    int band = tile / (BAND * columns) * BAND, height = min(BAND, rows - band), at = tile - band * columns;
    return make_int2((band + at % height) * TILE_M, at / height * TILE_N);
}

/* One thread: fills stage after stage, for all tiles of this block, whenever the consumers have freed one. */
static __device__ void k6_produce(int rows, int columns, int steps, const CUtensorMap *A, const CUtensorMap *B,
                                  unsigned char *ring, uint64_t *full, uint64_t *empty)
{
    unsigned i = 0; /* counts the stages that were filled */
    for (int tile = blockIdx.x; tile < rows * columns; tile += gridDim.x) {
        int2 corner = tile_corner(tile, rows, columns);
        for (int step = 0; step < steps; step++, i++) {
            unsigned       s = i % STAGES;
            unsigned char *a = ring + s * STAGE_BYTES, *b = a + A_BYTES;
            barrier_wait(&empty[s], (i / STAGES & 1) ^ 1);
            barrier_expect(&full[s], STAGE_BYTES);
            tma_load(a, A, step * TILE_K, corner.x, &full[s]);
            for (int j = 0; j < 4; j++) tma_load(b + j * BOX_BYTES, B, corner.y + 64 * j, step * TILE_K, &full[s]);
        }
    }
}

/* Two warpgroups: four products a stage, of 16 numbers along k each. While they run, those of the stage before end,
   and that stage is free. */
static __device__ void k6_consume(int m, int n, int steps, float *C, unsigned char *ring, uint64_t *full,
                                  uint64_t *empty)
{
    int      rows = (m + TILE_M - 1) / TILE_M, columns = (n + TILE_N - 1) / TILE_N;
    int      t = threadIdx.x - 128, group = t / 128, lane = t % 32;
    unsigned i = 0;
    float    d[128];
    for (int tile = blockIdx.x; tile < rows * columns; tile += gridDim.x) {
        int2 corner = tile_corner(tile, rows, columns);
        for (int step = 0; step < steps; step++, i++) {
            unsigned s = i % STAGES, a = shared_at(ring) + s * STAGE_BYTES, b = a + A_BYTES;
            a += group * 64 * 128;
            barrier_wait(&full[s], i / STAGES & 1);
            wgmma_fence();
            for (int k = 0; k < TILE_K; k += 16) /* 16 numbers of each row of A, 16 rows of B */
                wgmma_64x256x16(d, tile_descriptor(a + 2 * k, 16, 8 * 128),
                                tile_descriptor(b + 128 * k, BOX_BYTES, 8 * 128), step + k > 0);
            wgmma_commit();
            wgmma_wait<1>(); /* the step before is done, and this one goes on */
            if (step > 0 && lane == 0) barrier_arrive(&empty[(i - 1) % STAGES]);
        }
        wgmma_wait<0>();
        if (lane == 0) barrier_arrive(&empty[(i - 1) % STAGES]);
        /* Of a warp's 16 rows a thread has two, lane / 4 and that + 8, and of every 8 columns two neighbours. */
        int row = corner.x + t / 32 * 16 + lane / 4, col = corner.y + lane % 4 * 2;
        for (int j = 0; j < 32 && corner.y + 8 * j < n; j++) {
            float *c = C + (size_t)row * n + col + 8 * j;
            if (row < m) *(float2 *)c = make_float2(d[4 * j], d[4 * j + 1]);
            if (row + 8 < m) *(float2 *)(c + (size_t)8 * n) = make_float2(d[4 * j + 2], d[4 * j + 3]);
        }
    }
}

/* C (m, n) = A (m, k) B (k, n); n and k multiples of 8, because TMA wants rows of a multiple of 16 bytes. */
static __global__ __launch_bounds__(384) void k6_hopper(int m, int n, int k, const __grid_constant__ CUtensorMap A,
                                                        const __grid_constant__ CUtensorMap B, float *C)
{
    unsigned char *ring = shared_ring();
    uint64_t      *full = (uint64_t *)(ring + STAGES * STAGE_BYTES), *empty = full + STAGES;
    int            steps = (k + TILE_K - 1) / TILE_K;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(&full[s], 1); /* the producer's arrival, and the bytes */
            barrier_init(&empty[s], 8); /* an arrival of each warp of the consumers */
        }
        barrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_give<40>(); /* of the 168 that each thread begins with; the consumers need more */
        if (threadIdx.x == 0)
            k6_produce((m + TILE_M - 1) / TILE_M, (n + TILE_N - 1) / TILE_N, steps, &A, &B, ring, full, empty);
    } else {
        registers_take<232>();
        k6_consume(m, n, steps, C, ring, full, empty);
    }
}
#else
static __device__ int k6_compiled = 0;
static __global__ void k6_hopper(int, int, int, const __grid_constant__ CUtensorMap,
                                 const __grid_constant__ CUtensorMap, float *) {}
#endif

#ifndef HPML_CUDA_ON_CPU
static __global__ void k_round(const float *x, __nv_bfloat16 *y)
{
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    y[i] = __float2bfloat16_rn(x[i]);
}

typedef struct bench {
    int            n;
    float         *A, *B, *C;
    __nv_bfloat16 *Ah, *Bh;
    CUtensorMap    mapA, mapB;
    unsigned       blocks; /* of rung 6: one for each multiprocessor */
    cublasHandle_t blas;
} bench;

static const char *const rungs[] = { "naive", "coalesced", "tiled", "registers", "tensor cores", "Hopper",
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
    case 5: k6_hopper<<<b->blocks, 384, RING_BYTES>>>(n, n, n, b->mapA, b->mapB, b->C); break;
    case 6: cublasSgemm(b->blas, CUBLAS_OP_N, CUBLAS_OP_N, n, n, n, &one, b->B, n, b->A, n, &zero, b->C, n); break;
    default: /* row-major C = A B is column-major C^T = B^T A^T */
        cublasGemmEx(b->blas, CUBLAS_OP_N, CUBLAS_OP_N, n, n, n, &one, b->Bh, CUDA_R_16BF, n, b->Ah, CUDA_R_16BF, n,
                     &zero, b->C, CUDA_R_32F, n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    }
}

/* Prepares rung 6. Returns NULL, or why it cannot run here. */
static const char *prepare(bench *b)
{
    cudaDeviceProp gpu;
    int            device = 0, compiled = 0;
    if (cudaGetDevice(&device) || cudaGetDeviceProperties(&gpu, device)) return "no GPU answers";
    if (gpu.major != 9 || gpu.minor != 0) return "wgmma is for Hopper alone (H100, H200: sm_90a)";
    if (cudaMemcpyFromSymbol(&compiled, k6_compiled, sizeof compiled) || !compiled)
        return "built without -arch=sm_90a (or -gencode arch=compute_90a,code=sm_90a)";
    if (tensor_map(&b->mapA, b->Ah, b->n, b->n, TILE_M) || tensor_map(&b->mapB, b->Bh, b->n, b->n, TILE_K))
        return "the driver makes no tensor map";
    if (cudaFuncSetAttribute(k6_hopper, cudaFuncAttributeMaxDynamicSharedMemorySize, RING_BYTES))
        return "its shared memory is refused";
    b->blocks = (unsigned)gpu.multiProcessorCount;
    return NULL;
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
        { "--rung", OPTION_COUNT, &only, "N", "this one alone, 1 to 8 (all)" } };
    int failed = options_read("Times the rungs of the ladder.", table, sizeof table / sizeof *table, argc, argv);
    if (failed) return failed == 1 ? 0 : failed;
    if (size < 1 || size > 32768 || only > 8) return fprintf(stderr, "--size: 1 to 32768; --rung: 1 to 8\n"), 2;
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
    const char *lack = prepare(&b);
    printf("%d x %d\n%-4s %-14s %10s %12s %10s\n", b.n, b.n, "rung", "", "ms", "TFLOP/s", "error");
    for (int rung = 0; rung < 8; rung++) {
        float ms = 0;
        if (only && rung != only - 1) continue;
        if (rung == 5 && lack) {
            printf("%-4d %-14s skipped: %s\n", rung + 1, rungs[rung], lack);
            continue;
        }
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
#endif
