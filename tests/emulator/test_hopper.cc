/* Rung 6 of examples/ladder_matmul.cu, on a CPU: its product, of matrices of many shapes, in many orders; and what
   hopper_on_cpu.h promises: each of the mistakes that such a kernel can hold is planted here, and must be found. */
#define HPML_CUDA_ON_CPU
#include "hopper_on_cpu.h"
#include "../test.h"

#include "../../examples/hopper.h"

/* ---- mistakes --------------------------------------------------------------------------------------------------- */

enum mistake {
    SOUND,
    MAP_WITHOUT_SWIZZLE, MAP_SWIZZLE_64, TILE_WITHOUT_SWIZZLE, TILE_SWIZZLE_64,
    STRIDE_OF_A_HALF, STRIDE_OF_A_DOUBLE, STRIDE_OF_B_DOUBLE, LEADING_OF_B_HALF, OFFSETS_OF_B_EXCHANGED,
    PARITY_OF_FULL, PARITY_OF_EMPTY,
    EXPECTS_A_BYTE_LESS, EXPECTS_A_BOX_LESS, EXPECTS_A_BYTE_MORE,
    NO_WAIT_FOR_FULL, NO_WAIT_FOR_EMPTY, NO_WAIT_BEFORE_RELEASE, WAITS_FOR_LESS, NO_WAIT_AT_THE_END,
    NO_ARRIVAL, TOO_MANY_ARRIVALS, NO_FENCE, NO_COMMIT, NO_BARRIER_FENCE, NO_SYNCTHREADS,
    ADDS_TO_THE_LAST_TILE, TOO_MANY_REGISTERS, MISTAKES
};
static mistake planted;
static bool    is_producer(void) { return threadIdx.x < 128; }

static uint64_t tile_with_mistakes(unsigned at, unsigned leading, unsigned stride)
{
    bool of_b = leading > 16;
    if (planted == STRIDE_OF_A_HALF && !of_b) stride /= 2;
    if (planted == STRIDE_OF_A_DOUBLE && !of_b) stride *= 2;
    if (planted == STRIDE_OF_B_DOUBLE && of_b) stride *= 2;
    if (planted == LEADING_OF_B_HALF && of_b) leading /= 2;
    if (planted == OFFSETS_OF_B_EXCHANGED && of_b) std::swap(leading, stride);
    uint64_t tile = tile_descriptor(at, leading, stride);
    if (planted == TILE_WITHOUT_SWIZZLE) tile &= ~0ull >> 2;
    if (planted == TILE_SWIZZLE_64) tile ^= 3ull << 62;
    return tile;
}
static void wait_with_mistakes(uint64_t *b, unsigned parity)
{
    if (planted == (is_producer() ? NO_WAIT_FOR_EMPTY : NO_WAIT_FOR_FULL)) return;
    barrier_wait(b, parity ^ (planted == (is_producer() ? PARITY_OF_EMPTY : PARITY_OF_FULL)));
}
static void expect_with_mistakes(uint64_t *b, unsigned bytes)
{
    if (planted == EXPECTS_A_BYTE_LESS) bytes -= 1;
    if (planted == EXPECTS_A_BOX_LESS) bytes -= 64 * 64 * 2;
    if (planted == EXPECTS_A_BYTE_MORE) bytes += 1;
    barrier_expect(b, bytes);
}
static void arrive_with_mistakes(uint64_t *b)
{
    if (planted == NO_ARRIVAL && threadIdx.x / 32 == 7) return;
    barrier_arrive(b);
    if (planted == TOO_MANY_ARRIVALS) barrier_arrive(b);
}
template <int n> static void products_with_mistakes(void)
{
    if (n == 0 && planted == NO_WAIT_AT_THE_END) return;
    if (n == 1 && planted == NO_WAIT_BEFORE_RELEASE) return;
    if (n == 1 && planted == WAITS_FOR_LESS) wgmma_wait<2>();
    else wgmma_wait<n>();
}
static void multiply_with_mistakes(float (&d)[128], uint64_t a, uint64_t b, int add)
{
    wgmma_64x256x16(d, a, b, add || planted == ADDS_TO_THE_LAST_TILE);
}
template <int n> static void registers_with_mistakes(void)
{
    if (planted == TOO_MANY_REGISTERS) registers_take<n + 8>();
    else registers_take<n>();
}
#define tile_descriptor tile_with_mistakes
#define barrier_wait wait_with_mistakes
#define barrier_expect expect_with_mistakes
#define barrier_arrive arrive_with_mistakes
#define wgmma_wait products_with_mistakes
#define wgmma_64x256x16 multiply_with_mistakes
#define registers_take registers_with_mistakes
#define wgmma_fence() (planted == NO_FENCE ? (void)0 : wgmma_fence())
#define wgmma_commit() (planted == NO_COMMIT ? (void)0 : wgmma_commit())
#define barrier_init_fence() (planted == NO_BARRIER_FENCE ? (void)0 : barrier_init_fence())
#define __syncthreads() (planted == NO_SYNCTHREADS ? (void)0 : __syncthreads())
#include "../../examples/ladder_matmul.cu"
#undef tile_descriptor
#undef barrier_wait
#undef barrier_expect
#undef barrier_arrive
#undef wgmma_wait
#undef wgmma_64x256x16
#undef registers_take
#undef wgmma_fence
#undef wgmma_commit
#undef barrier_init_fence
#undef __syncthreads

/* ---- one instruction at a time ---------------------------------------------------------------------------------- */

/* Which piece of 16 bytes lies at each place of a row, as in the picture of the ladder. */
static const int picture[8][8] = {
    { 0, 1, 2, 3, 4, 5, 6, 7 }, { 1, 0, 3, 2, 5, 4, 7, 6 }, { 2, 3, 0, 1, 6, 7, 4, 5 }, { 3, 2, 1, 0, 7, 6, 5, 4 },
    { 4, 5, 6, 7, 0, 1, 2, 3 }, { 5, 4, 7, 6, 1, 0, 3, 2 }, { 6, 7, 4, 5, 2, 3, 0, 1 }, { 7, 6, 5, 4, 3, 2, 1, 0 } };

TEST(the_swizzle_spreads_each_piece_of_eight_rows_over_all_banks)
{
    for (unsigned p = 0; p < 8; p++) {
        unsigned places = 0;
        for (unsigned row = 0; row < 8; row++) {
            unsigned at = emu::swizzled(4096 + row * 128 + p * 16, 3), place = at % 128 / 16;
            ENSURE(at / 128 == 32 + row && picture[row][place] == (int)p);
            places |= 1u << place; /* four of the 32 banks */
        }
        ENSURE(places == 0xff);
    }
}

static __global__ void k_box(unsigned short *y, CUtensorMap map, int column, int row)
{
    unsigned short *to = reinterpret_cast<unsigned short *>(shared_ring()); /* 16 rows of 64 */
    uint64_t       *b = reinterpret_cast<uint64_t *>(to + 16 * 64);
    if (threadIdx.x == 0) {
        barrier_init(b, 1);
        barrier_init_fence();
        barrier_expect(b, 16 * 64 * 2);
        tma_load(to, &map, column, row, b);
    }
    __syncthreads();
    barrier_wait(b, 0);
    for (unsigned i = threadIdx.x; i < 16 * 64; i += 32) y[i] = to[i];
}

TEST(tma_copies_a_box_and_swizzles_it)
{
    const int       rows = 20, columns = 136;
    unsigned short *x = nullptr, *y = nullptr;
    CUtensorMap     map;
    std::vector<unsigned short> h(rows * columns), to(16 * 64);
    cuda_on_cpu_reset();
    cudaMalloc(&x, h.size() * 2), cudaMalloc(&y, to.size() * 2);
    for (int i = 0; i < rows * columns; i++) h[(size_t)i] = (unsigned short)(i + 1);
    cudaMemcpy(x, h.data(), h.size() * 2, cudaMemcpyHostToDevice);
    ENSURE(tensor_map(&map, reinterpret_cast<__nv_bfloat16 *>(x), rows, columns, 16) == 0);
    static const int corners[][2] = { { 0, 0 }, { 64, 3 }, { 128, 8 }, { -8, -2 }, { 136, 0 }, { 5, 19 } };
    for (const auto &corner : corners)
        for (unsigned order = 0; order < 3; order++) {
            cuda_on_cpu_order(order);
            HPMLG_LAUNCH(k_box, 1, 32, 16 * 64 * 2 + 8, (cudaStream_t)0, y, map, corner[0], corner[1]);
            cudaMemcpy(to.data(), y, to.size() * 2, cudaMemcpyDeviceToHost);
            for (int row = 0; row < 16; row++)
                for (int i = 0; i < 64; i++) {
                    int  at_x = corner[0] + picture[row % 8][i / 8] * 8 + i % 8, at_y = corner[1] + row;
                    bool is_inside = at_x >= 0 && at_y >= 0 && at_x < columns && at_y < rows;
                    ENSURE(to[(size_t)(row * 64 + i)] == (is_inside ? at_y * columns + at_x + 1 : 0));
                }
        }
    cudaFree(x), cudaFree(y);
}

TEST(tensor_maps_beyond_the_limits_are_refused)
{
    alignas(16) static __nv_bfloat16 x[64];
    CUtensorMap map;
    ENSURE(tensor_map(&map, x, 4, 16, 256) == 0);
    ENSURE(tensor_map(&map, x, 4, 16, 257) != 0);     /* a box of at most 256 rows */
    ENSURE(tensor_map(&map, x, 4, 12, 4) != 0);       /* rows of a multiple of 16 bytes */
    ENSURE(tensor_map(&map, x + 4, 4, 16, 4) != 0);   /* from an address of that kind */
    ENSURE(tensor_map(&map, x, 0, 16, 4) != 0);
}

/* a (64, 16) as numbers 16 to 31 of rows of 64, b (16, 256) as rows 8 to 23 of four boxes, both swizzled by hand. */
static __global__ void k_product(float *y, const unsigned short *a, const unsigned short *b)
{
    unsigned short *to = reinterpret_cast<unsigned short *>(shared_ring()), *to_b = to + 64 * 64;
    unsigned        t = threadIdx.x, at = shared_at(to);
    float           d[128];
    for (unsigned i = t; i < 64 * 64 + 4 * 64 * 64; i += 128) to[i] = 0x7fff;
    __syncthreads();
    for (unsigned i = t; i < 64 * 16; i += 128) {
        unsigned row = i / 16, column = 16 + i % 16;
        for (unsigned place = 0; place < 8; place++)
            if ((unsigned)picture[row % 8][place] == column / 8) to[row * 64 + place * 8 + column % 8] = a[i];
    }
    for (unsigned i = t; i < 16 * 256; i += 128) {
        unsigned row = 8 + i / 256, column = i % 256;
        unsigned short *box = to_b + column / 64 * 64 * 64;
        for (unsigned place = 0; place < 8; place++)
            if ((unsigned)picture[row % 8][place] == column % 64 / 8) box[row * 64 + place * 8 + column % 8] = b[i];
    }
    __syncthreads();
    wgmma_fence();
    for (int add = 0; add < 2; add++)
        wgmma_64x256x16(d, tile_descriptor(at + 32, 16, 1024),
                        tile_descriptor(at + 64 * 64 * 2 + 1024, 64 * 64 * 2, 1024), add);
    wgmma_commit();
    wgmma_wait<0>();
    for (unsigned i = 0; i < 128; i++) y[t * 128 + i] = d[i];
}

TEST(wgmma_reads_and_writes_in_its_layouts)
{
    unsigned short *a = nullptr, *b = nullptr;
    float          *y = nullptr;
    std::vector<unsigned short> ha(64 * 16), hb(16 * 256);
    std::vector<float>          hy(128 * 128);
    const size_t                bytes = (64 * 64 + 4 * 64 * 64) * 2;
    cuda_on_cpu_reset();
    cudaMalloc(&a, ha.size() * 2), cudaMalloc(&b, hb.size() * 2), cudaMalloc(&y, hy.size() * 4);
    for (size_t i = 0; i < ha.size(); i++) ha[i] = __float2bfloat16_rn((float)(i * 37 % 61) - 30).__x;
    for (size_t i = 0; i < hb.size(); i++) hb[i] = __float2bfloat16_rn((float)(i * 29 % 67) - 33).__x;
    cudaMemcpy(a, ha.data(), ha.size() * 2, cudaMemcpyHostToDevice);
    cudaMemcpy(b, hb.data(), hb.size() * 2, cudaMemcpyHostToDevice);
    for (unsigned order = 0; order < 4; order++) {
        cuda_on_cpu_order(order);
        HPMLG_LAUNCH(k_product, 1, 128, bytes, (cudaStream_t)0, y, a, b);
        cudaMemcpy(hy.data(), y, hy.size() * 4, cudaMemcpyDeviceToHost);
        for (size_t row = 0; row < 64; row++)
            for (size_t column = 0; column < 256; column++) {
                float sum = 0; /* exact */
                for (size_t k = 0; k < 16; k++)
                    sum += __bfloat162float({ ha[row * 16 + k] }) * __bfloat162float({ hb[k * 256 + column] });
                /* PTX: of eight rows the first four threads have the first, two columns each; then the next four. */
                size_t thread = row / 16 * 32 + row % 8 * 4 + column % 8 / 2;
                size_t i = column / 8 * 4 + row % 16 / 8 * 2 + column % 2;
                ENSURE(hy[thread * 128 + i] == 2 * sum);
            }
    }
    cudaFree(a), cudaFree(b), cudaFree(y);
}

/* ---- the product ------------------------------------------------------------------------------------------------ */

static unsigned short random_bf16(uint64_t *state)
{
    return __float2bfloat16_rn((float)(emu::draw(state) >> 40) / 8388608.0f - 1).__x;
}

/* C = A B by rung 6, with so many blocks, and what it should be. */
struct product {
    int                         m, n, k;
    std::vector<__nv_bfloat16>  a, b;
    std::vector<float>          c;
    std::vector<double>         wanted;
    __nv_bfloat16              *A = nullptr, *B = nullptr;
    float                      *C = nullptr;

    product(int rows, int columns, int depth) : m(rows), n(columns), k(depth)
    {
        uint64_t seed = 7;
        cuda_on_cpu_reset();
        a.resize((size_t)m * k), b.resize((size_t)k * n), wanted.resize((size_t)m * n);
        for (auto &v : a) v.__x = random_bf16(&seed);
        for (auto &v : b) v.__x = random_bf16(&seed);
        for (int i = 0; i < m; i++)
            for (int l = 0; l < k; l++)
                for (int j = 0; j < n; j++)
                    wanted[(size_t)i * n + j] += (double)__bfloat162float(a[(size_t)i * k + l]) *
                                                 (double)__bfloat162float(b[(size_t)l * n + j]);
        cudaMalloc(&A, a.size() * 2), cudaMalloc(&B, b.size() * 2), cudaMalloc(&C, (wanted.size() + n) * 4);
        cudaMemcpy(A, a.data(), a.size() * 2, cudaMemcpyHostToDevice);
        cudaMemcpy(B, b.data(), b.size() * 2, cudaMemcpyHostToDevice);
    }
    product(const product &) = delete;
    ~product() { cudaFree(A), cudaFree(B), cudaFree(C), cuda_on_cpu_reset(); }

    /* True if all elements are right and the row behind C is as before. An error of a kernel: cuda_on_cpu_caught(). */
    bool is_right(unsigned blocks, unsigned order)
    {
        CUtensorMap mapA, mapB;
        c.assign(wanted.size() + (size_t)n, 0);
        cudaMemset(C, 0xff, c.size() * 4);
        if (tensor_map(&mapA, A, m, k, TILE_M) || tensor_map(&mapB, B, k, n, TILE_K)) return false;
        if (planted == MAP_WITHOUT_SWIZZLE) mapA.swizzle = CU_TENSOR_MAP_SWIZZLE_NONE;
        if (planted == MAP_SWIZZLE_64) mapB.swizzle = CU_TENSOR_MAP_SWIZZLE_64B;
        cudaFuncSetAttribute(k6_hopper, cudaFuncAttributeMaxDynamicSharedMemorySize, RING_BYTES);
        cuda_on_cpu_order(order);
        emu::products_issued = 0;
        HPMLG_LAUNCH(k6_hopper, blocks, 384, RING_BYTES, (cudaStream_t)0, m, n, k, mapA, mapB, C);
        if (cudaDeviceSynchronize() || cudaGetLastError()) return false;
        cudaMemcpy(c.data(), C, c.size() * 4, cudaMemcpyDeviceToHost);
        for (size_t i = 0; i < wanted.size(); i++)
            if (!(fabs(c[i] - wanted[i]) <= 1e-6 * k)) return false;
        for (size_t i = wanted.size(); i < c.size(); i++)
            if (!std::isnan(c[i])) return false;
        return true;
    }
};

TEST(rung_6_multiplies_matrices_of_any_shape)
{
    static const struct { int m, n, k; unsigned blocks; } shapes[] = {
        { 128, 256, 64, 1 },    /* one tile, one step */
        { 128, 256, 640, 1 },   /* the ring goes round */
        { 64, 8, 8, 1 },        /* less than a tile in each direction */
        { 1, 264, 72, 2 },      /* a row, and a little of a second tile and of a second step */
        { 129, 520, 328, 2 },   /* three tiles a block, the last ones of a few rows and columns */
        { 200, 248, 1000, 5 },  /* more blocks than tiles */
        { 2200, 264, 16, 3 },   /* 18 rows of tiles: more than a band */
    };
    const unsigned orders = getenv("HPML_TEST_ALL") ? 16 : 4;
    planted = SOUND;
    for (const auto &s : shapes) {
        product p(s.m, s.n, s.k);
        long    steps = (s.m + 127) / 128 * ((s.n + 255) / 256) * ((s.k + 63) / 64); /* four products of eight warps */
        for (unsigned order = 0; order < orders; order++)
            if (!p.is_right(s.blocks, order) || emu::products_issued != steps * 4 * 8)
                printf("    (%d, %d, %d) in order %u\n", s.m, s.n, s.k, order), test_failed = 1;
    }
}

TEST(every_mistake_is_found)
{
    static const struct { mistake what; const char *text; } mistakes[] = {
        /* wrong numbers */
        { MAP_WITHOUT_SWIZZLE, "" },
        { MAP_SWIZZLE_64, "" },
        { TILE_WITHOUT_SWIZZLE, "" },
        { TILE_SWIZZLE_64, "" },
        { STRIDE_OF_A_HALF, "" },
        { STRIDE_OF_A_DOUBLE, "" },
        { STRIDE_OF_B_DOUBLE, "" },
        { LEADING_OF_B_HALF, "" },
        { OFFSETS_OF_B_EXCHANGED, "" },
        { ADDS_TO_THE_LAST_TILE, "" },
        /* named by the emulation */
        { PARITY_OF_FULL, "has not waited for the arrival" },
        { PARITY_OF_EMPTY, "mbarrier.try_wait" },
        { EXPECTS_A_BYTE_LESS, "mbarrier.try_wait" },
        { EXPECTS_A_BOX_LESS, "has not waited for the arrival" },
        { EXPECTS_A_BYTE_MORE, "mbarrier.try_wait" },
        { NO_WAIT_FOR_FULL, "has not waited for the arrival" },
        { NO_WAIT_FOR_EMPTY, "more than the 1 arrivals" },
        { NO_WAIT_BEFORE_RELEASE, "still reads" },
        { WAITS_FOR_LESS, "still reads" },
        { NO_WAIT_AT_THE_END, "still reads" },
        { NO_ARRIVAL, "mbarrier.try_wait" },
        { TOO_MANY_ARRIVALS, "still reads" },
        { NO_FENCE, "without a wgmma.fence" },
        { NO_COMMIT, "still reads" },
        { NO_BARRIER_FENCE, "no fence after the barrier's mbarrier.init" },
        { NO_SYNCTHREADS, "no barrier was initialized" },
        { TOO_MANY_REGISTERS, "registers, but has" },
    };
    const unsigned orders = 4;
    product        p(300, 256, 520); /* three tiles of nine steps, in one block */
    unsigned       planted_once = 0;
    for (const auto &m : mistakes) {
        unsigned found = 0, named = 0;
        for (unsigned order = 0; order < orders; order++) {
            planted = m.what;
            cuda_on_cpu_expect();
            bool        is_right = p.is_right(1, order);
            const char *text     = cuda_on_cpu_caught();
            found += !is_right || text[0];
            named += strstr(text, m.text) != NULL;
            if (getenv("HOPPER_MISTAKES")) printf("    %d, order %u: %s\n", m.what, order, text[0] ? text : "numbers");
        }
        planted_once |= 1u << m.what;
        /* Without __syncthreads the kernel is right where the first thread happens to be ahead. */
        if (found < (m.what == NO_SYNCTHREADS ? 1 : orders) || !named)
            printf("    mistake %d: found in %u of %u orders, by its name in %u\n", m.what, found, orders, named),
                test_failed = 1;
    }
    planted = SOUND;
    ENSURE(planted_once == (1u << MISTAKES) - 2);
    ENSURE(p.is_right(1, 0)); /* and all is sound after this */
}
