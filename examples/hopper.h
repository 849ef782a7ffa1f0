/* Instructions of Hopper (sm_90a) that CUDA C++ has no names for, each a function of one PTX instruction: barriers in
   shared memory, the copies of TMA, the products of warpgroups. How they work together: ladder_matmul.cu, rung 6.
   tests/emulator/hopper_on_cpu.h has the same functions for a CPU. */
#ifndef HPML_HOPPER_H
#define HPML_HOPPER_H

#ifndef HPML_CUDA_ON_CPU
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#if !defined __CUDA_ARCH__ || defined __CUDA_ARCH_FEAT_SM90_ALL
/* The block's dynamic shared memory. Its address is a multiple of 1,024 bytes, after which the swizzle repeats. */
static __device__ unsigned char *shared_ring(void)
{
    extern __shared__ __align__(1024) unsigned char ring[];
    return ring;
}
static __device__ unsigned shared_at(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

/* A phase of a barrier is complete after so many arrivals, once all expected bytes are there as well. */
static __device__ void barrier_init(uint64_t *b, unsigned arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_at(b)), "r"(arrivals) : "memory");
}
/* TMA sees the barriers that this thread has initialized. */
static __device__ void barrier_init_fence(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
static __device__ void barrier_arrive(uint64_t *b)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_at(b)) : "memory");
}
/* Arrives; the phase then waits for so many more bytes from TMA. */
static __device__ void barrier_expect(uint64_t *b, unsigned bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_at(b)), "r"(bytes) : "memory");
}
/* Waits until the phase of this parity is complete; of a new barrier that of parity 1 is. */
static __device__ void barrier_wait(uint64_t *b, unsigned parity)
{
    for (int done = 0; !done;)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(shared_at(b)), "r"(parity) : "memory");
}

/* One thread starts a copy of the map's box from column x, row y on; barrier b counts the bytes as they arrive.
   Elements outside of the matrix arrive as 0. */
static __device__ void tma_load(void *to, const CUtensorMap *map, int x, int y, uint64_t *b)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
                 "[%4];" ::"r"(shared_at(to)), "l"(map), "r"(x), "r"(y), "r"(shared_at(b)) : "memory");
}

/* Sets the number of registers of each thread of a warpgroup: first some give registers back, then others take them. */
template <int n> static __device__ void registers_give(void)
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n));
}
template <int n> static __device__ void registers_take(void)
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n));
}

/* Before the first product, and before products whose sums a thread has touched. */
static __device__ void wgmma_fence(void) { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
/* The products since the last commit become a group. */
static __device__ void wgmma_commit(void) { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/* Waits until at most n groups, the latest ones, are not done. */
template <int n> static __device__ void wgmma_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(n) : "memory");
}
/* Starts d (64, 256) += a (64, 16) b (16, 256), or d = a b with !add: 128 threads together, bf16, sums in f32. Thread t
   has of row t / 32 * 16 + t % 32 / 4 the columns 8 j + 2 (t % 4) and the next in d[4 j] and d[4 j + 1], and of the row
   8 below in d[4 j + 2] and d[4 j + 3]. Descriptors say where a and b are; both have rows that are contiguous. */
#define HOPPER_8(i)                                                                                                   \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]),       \
        "+f"(d[i + 7])
#define HOPPER_32(i) HOPPER_8(i), HOPPER_8(i + 8), HOPPER_8(i + 16), HOPPER_8(i + 24)
static __device__ void wgmma_64x256x16(float (&d)[128], uint64_t a, uint64_t b, int add)
{
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %130, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,"
        "%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,"
        "%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,"
        "%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,"
        "%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,"
        "%127"
        "}, %128, %129, p, 1, 1, 0, 1; }" /* + a, + b; a is not transposed, b is */
        : HOPPER_32(0), HOPPER_32(32), HOPPER_32(64), HOPPER_32(96)
        : "l"(a), "l"(b), "r"(add));
}
#endif
#endif

/* Where a tile lies in shared memory, with the 128-byte swizzle: bits 0-13 are its address, 16-29 and 32-45 two
   distances, all three in units of 16 bytes, bits 62-63 the swizzle (1: 128 bytes). Its rows are 64 numbers.
   Of a (rows along k): stride leads from 8 rows to the next 8; leading is ignored, pass 16. Of b (rows along n):
   leading leads from 64 columns to the next 64, stride from 8 rows to the next 8. The arguments are in bytes. */
static inline __device__ uint64_t tile_descriptor(unsigned at, unsigned leading, unsigned stride)
{
    return at >> 4 | (uint64_t)(leading >> 4) << 16 | (uint64_t)(stride >> 4) << 32 | (uint64_t)1 << 62;
}

/* Describes x (rows, columns) to TMA, which copies boxes of box_rows rows and 64 columns; columns is a multiple of 8.
   Returns 0, or an error of the driver, whose function is found at run time: nothing is linked to the driver. */
static int tensor_map(CUtensorMap *map, const __nv_bfloat16 *x, int rows, int columns, int box_rows)
{
    void                           *entry = NULL;
    cudaDriverEntryPointQueryResult found;
    const cuuint64_t size[] = { (cuuint64_t)columns, (cuuint64_t)rows }, stride[] = { (cuuint64_t)columns * 2 };
    const cuuint32_t box[] = { 64, (cuuint32_t)box_rows }, every[] = { 1, 1 };
#if CUDART_VERSION >= 12050
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
#else
    cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &found);
#endif
    if (!entry) return -1;
    return ((decltype(&cuTensorMapEncodeTiled))entry)(
        map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void *)x, size, stride, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}
#endif
