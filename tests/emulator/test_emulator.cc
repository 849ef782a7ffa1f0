/* Does cuda_on_cpu.h compute what a GPU computes, and does it find the faults that it promises to find? Each
   fault is planted here beside its sound twin, which must pass. */
#define HPML_CUDA_ON_CPU
#include "cuda_on_cpu.h"
#include "../test.h"

#include <sys/wait.h>
#include <unistd.h>

#define ALL 0xffffffffu
#define RUN(kernel, grid, block, ...) HPMLG_LAUNCH(kernel, grid, block, 0, (cudaStream_t)0, ##__VA_ARGS__)
#define CAUGHT(text) ENSURE(strstr(cuda_on_cpu_caught(), text) != NULL)

/* Device memory that goes when the test ends, however it ends. */
template <class T> struct buffer {
    T     *p = nullptr;
    size_t n;
    explicit buffer(size_t count) : n(count)
    {
        cuda_on_cpu_reset();
        cudaMalloc(&p, n * sizeof(T));
    }
    buffer(const buffer &) = delete;
    ~buffer() { cudaFree(p), cuda_on_cpu_reset(); }
    void set(const std::vector<T> &v) { cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice); }
    std::vector<T> get(void)
    {
        std::vector<T> v(n);
        cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost);
        return v;
    }
    template <class F> int differs(const F &run) { return cuda_on_cpu_differs(8, run, p, n * sizeof(T)); }
};

/* What a child process prints before it dies; "" if it ends well. */
template <class F> static std::string death(const F &run)
{
    std::string text;
    char        bytes[4096];
    ssize_t     n;
    int         ends[2], status = 0;
    fflush(stdout);
    if (pipe(ends)) return "";
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], 2);
        close(ends[0]), close(ends[1]);
        run();
        _exit(0);
    }
    close(ends[1]);
    while ((n = read(ends[0], bytes, sizeof bytes)) > 0) text.append(bytes, (size_t)n);
    close(ends[0]);
    waitpid(child, &status, 0);
    return status ? text : "";
}

/* ---- threads and blocks ----------------------------------------------------------------------------------------- */

static __global__ void k_places(unsigned *y)
{
    unsigned block  = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    y[block * blockDim.x * blockDim.y * blockDim.z + thread] += block * 1000 + thread;
}

TEST(every_thread_of_every_block_runs_once_in_every_order)
{
    buffer<unsigned> y(2 * 3 * 4 * 120);
    for (unsigned order = 0; order < 6; order++) {
        cuda_on_cpu_order(order);
        cudaMemset(y.p, 0, y.n * sizeof(unsigned));
        RUN(k_places, dim3(2, 3, 4), dim3(5, 4, 6), y.p);
        std::vector<unsigned> h = y.get();
        for (unsigned i = 0; i < y.n; i++) ENSURE(h[i] == i / 120 * 1000 + i % 120);
    }
}

static __global__ void k_reverse(float *y, bool barrier)
{
    HPMLG_SHARED(float, s);
    s[threadIdx.x] = (float)threadIdx.x;
    if (barrier) __syncthreads();
    y[blockIdx.x * blockDim.x + threadIdx.x] = s[blockDim.x - 1 - threadIdx.x];
}
template <int N> static __global__ void k_rounds(float *y, bool barrier)
{
    __shared__ float s[N];
    float            sum = 0;
    for (int r = 0; r < 4; r++) {
        s[threadIdx.x] = (float)(r * N) + (float)threadIdx.x;
        __syncthreads();
        sum += s[(threadIdx.x + 37) % N];
        if (barrier) __syncthreads();
    }
    y[threadIdx.x] = sum;
}
static __global__ void k_in_warp(float *y, bool barrier)
{
    HPMLG_SHARED(float, s);
    s[threadIdx.x] = (float)threadIdx.x;
    if (barrier) __syncwarp();
    y[threadIdx.x] = s[threadIdx.x ^ 1];
}
static __global__ void k_blocks_race(float *y, bool racing)
{
    if (racing) y[0] = (float)blockIdx.x;
    else y[blockIdx.x] = (float)blockIdx.x;
}

#ifdef CUDA_ON_CPU_TSAN
#define RACES SKIP("races on purpose")
#else
#define RACES
#endif

TEST(a_missing_barrier_shows_in_another_order)
{
    RACES;
    buffer<float> y(512);
    auto reverse = [&](bool barrier) {
        return [&y, barrier] { HPMLG_LAUNCH(k_reverse, 2, 256, 1024, (cudaStream_t)0, y.p, barrier); };
    };
    auto rounds  = [&](bool barrier) { return [&y, barrier] { RUN((k_rounds<256>), 1, 256, y.p, barrier); }; };
    auto in_warp = [&](bool barrier) {
        return [&y, barrier] { HPMLG_LAUNCH(k_in_warp, 1, 64, 256, (cudaStream_t)0, y.p, barrier); };
    };
    auto blocks  = [&](bool racing) { return [&y, racing] { RUN(k_blocks_race, 8, 32, y.p, racing); }; };
    ENSURE(y.differs(reverse(true)) == -1);
    ENSURE(y.get()[0] == 255);
    ENSURE(y.differs(reverse(false)) > 0);
    ENSURE(y.differs(rounds(true)) == -1);
    ENSURE(y.differs(rounds(false)) > 0);
    ENSURE(y.differs(in_warp(true)) == -1);
    ENSURE(y.differs(in_warp(false)) > 0);
    ENSURE(y.differs(blocks(false)) == -1);
    ENSURE(y.differs(blocks(true)) > 0);
}

TEST(a_missing_barrier_is_named_when_every_launch_is_checked)
{
    RACES;
    buffer<float> y(512);
    cuda_on_cpu_check(4);
    cuda_on_cpu_expect();
    HPMLG_LAUNCH(k_reverse, 2, 256, 1024, (cudaStream_t)0, y.p, true);
    ENSURE(cuda_on_cpu_caught()[0] == 0);
    ENSURE(y.get()[0] == 255);
    cuda_on_cpu_expect();
    HPMLG_LAUNCH(k_reverse, 2, 256, 1024, (cudaStream_t)0, y.p, false);
    CAUGHT("k_reverse: order 0 and order 1 differ at byte");
}

/* ThreadSanitizer sees nothing in a forked child: this program is started again, for one kernel. */
TEST(planted_race)
{
    const char *kernel = getenv("EMULATOR_RACE");
    if (!kernel) SKIP("part of the next one");
    bool          barrier = strchr(kernel, '+') != NULL;
    buffer<float> y(512);
    if (kernel[0] == 'b') HPMLG_LAUNCH(k_reverse, 2, 256, 1024, (cudaStream_t)0, y.p, barrier);
    if (kernel[0] == 'w') HPMLG_LAUNCH(k_in_warp, 1, 64, 256, (cudaStream_t)0, y.p, barrier);
    if (kernel[0] == 'r') RUN((k_rounds<64>), 1, 64, y.p, barrier);
}

TEST(races_are_reported_by_thread_sanitizer)
{
#ifndef CUDA_ON_CPU_TSAN
    SKIP("built without ThreadSanitizer");
#else
    static const char *kernels[] = { "b", "b+", "w", "w+", "r", "r+" };
    char               self[4000], bytes[4096];
    ssize_t            length = readlink("/proc/self/exe", self, sizeof self - 1);
    ENSURE(length > 0);
    self[length] = 0;
    for (unsigned i = 0; i < 12; i++) {
        std::string line = "TSAN_OPTIONS=\"$TSAN_OPTIONS:atexit_sleep_ms=0\""; /* no thread is left to race at exit */
        line += std::string(" EMULATOR_RACE=") + kernels[i / 2] + " CUDA_ON_CPU_ORDER=" + (i % 2 ? "3" : "0");
        std::string text;
        FILE       *f = popen((line + " '" + self + "' --filter planted_race 2>&1").c_str(), "r");
        bool        sound = kernels[i / 2][1] == '+';
        ENSURE(f != NULL);
        while (size_t n = fread(bytes, 1, sizeof bytes, f)) text.append(bytes, n);
        int status = pclose(f);
        ENSURE(text.find("ok planted_race") != std::string::npos);
        ENSURE(sound == (text.find("data race") == std::string::npos) && sound == (status == 0));
    }
#endif
}

enum { EARLY_EXIT, LATE_EXIT, TWO_PLACES, HALF_A_WARP, GONE_LANE, NOT_IN_MASK, READS_OUTSIDE, TWO_MASKS, FOR_EVER,
       ODD_ADDRESS };

static __global__ void k_faulty(float *y, int fault)
{
    int t = (int)threadIdx.x;
    if (fault == EARLY_EXIT) {
        if (t == 3) return;
        __syncthreads();
    } else if (fault == LATE_EXIT) {
        if (t != 63) __syncthreads();
    } else if (fault == TWO_PLACES) {
        if (t < 32) __syncthreads();
        else __syncthreads();
    } else if (fault == HALF_A_WARP) {
        if (t < 16) __syncthreads();
    } else if (fault == GONE_LANE) {
        if (t == 5) return;
        y[t] = __shfl_xor_sync(ALL, y[t], 1);
    } else if (fault == NOT_IN_MASK) {
        y[t] = __shfl_xor_sync(0xffffu, y[t], 1);
    } else if (fault == READS_OUTSIDE) {
        if (t < 16) y[t] = __shfl_down_sync(0xffffu, y[t], 8);
    } else if (fault == TWO_MASKS) {
        y[t] = __shfl_sync(t < 8 ? 0xffu : 0xff0fu, y[t], t & 7);
    } else if (fault == FOR_EVER) {
        if (t == 0) __syncwarp(3u);
        else __syncthreads();
    } else if (fault == ODD_ADDRESS) {
        hpmlg_copy_async16(y + 1, y, true);
    }
}

TEST(barriers_and_warp_operations_that_not_all_reach_are_named)
{
    buffer<float> y(64);
    static const struct { int fault; const char *block, *text; } faults[] = {
        { EARLY_EXIT, "thread (3,0,0)", "exits while thread (0,0,0) waits in __syncthreads (line" },
        { LATE_EXIT, "thread (63,0,0)", "exits while thread (0,0,0) waits in __syncthreads" },
        { TWO_PLACES, "thread (32,0,0)", "but thread (0,0,0) waits in __syncthreads" },
        { HALF_A_WARP, "thread (16,0,0)", "exits while thread (0,0,0) waits in __syncthreads" },
        { GONE_LANE, "thread (5,0,0)", "exits, but lane 0 names it in __shfl_xor_sync" },
        { NOT_IN_MASK, "thread (16,0,0)", "lacks the calling lane 16" },
        { READS_OUTSIDE, "thread (15,0,0)", "lane 8 reads lane 16, which is not in the mask" },
        { TWO_MASKS, "thread (8,0,0)", "which has exited or never was" },
        { FOR_EVER, "thread (0,0,0)", "is in __syncthreads" },
        { ODD_ADDRESS, "thread (0,0,0)", "not aligned to 16 bytes" },
    };
    for (const auto &f : faults) {
        cuda_on_cpu_expect();
        RUN(k_faulty, 2, 64, y.p, f.fault);
        const char *text = cuda_on_cpu_caught();
        if (!strstr(text, "k_faulty, block (0,0,0)") || !strstr(text, f.text) ||
            (f.fault < NOT_IN_MASK && !strstr(text, f.block)))
            printf("    fault %d: %s\n", f.fault, text), test_failed = 1;
    }
    std::string text = death([&] { RUN(k_faulty, 1, 64, y.p, (int)EARLY_EXIT); });
    ENSURE(text.find("cuda_on_cpu: k_faulty, block (0,0,0), thread (") != std::string::npos);
    RUN(k_rounds<64>, 1, 64, y.p, true);                 /* and stacks are sound after all this */
    ENSURE(y.get()[0] == 4 * 37 + 64 * 6);
}

static __global__ void k_unwritten(float *y)
{
    HPMLG_SHARED(float, dynamic);
    __shared__ float fixed[32];
    int t = (int)threadIdx.x;
    y[32 + t] = dynamic[t];
    y[64 + t] = fixed[t];
    __syncthreads();
    dynamic[t] = fixed[t] = 1;
}

TEST(what_nobody_wrote_is_nan)
{
    buffer<float> y(96);
    HPMLG_LAUNCH(k_unwritten, 2, 32, 128, (cudaStream_t)0, y.p);
    std::vector<float> h = y.get();
#ifdef CUDA_ON_CPU_ASAN
    h.resize(64);                                       /* static shared arrays have red zones instead */
#endif
    for (float v : h) ENSURE(v != v);
}

static __global__ void k_store(float *y, int at, int where)
{
    HPMLG_SHARED(float, dynamic);
    __shared__ float fixed[32];
    float *to = where == 0 ? y : where == 1 ? dynamic : fixed;
    __syncthreads();
    if (threadIdx.x == 31) to[at] = 1;
}

TEST(out_of_bounds_dies_under_address_sanitizer)
{
#ifndef CUDA_ON_CPU_ASAN
    SKIP("built without AddressSanitizer");
#else
    buffer<float> y(32);
    float         on_host = 0;
    for (int where = 0; where < 3; where++) {
        auto store = [&](int at) {
            return death([&] { HPMLG_LAUNCH(k_store, 1, 32, 128, (cudaStream_t)0, y.p, at, where); });
        };
        ENSURE(store(31) == "");
        ENSURE(store(32).find("AddressSanitizer") != std::string::npos);
        ENSURE(where == 2 || store(-1).find("AddressSanitizer") != std::string::npos);
        ENSURE(store(32).find("k_store") != std::string::npos);
    }
    buffer<char> large((size_t)64 << 20);               /* must not leave the small ones closed */
    RUN(k_store, 1, 32, y.p, 31, 0);
    ENSURE(death([&] { on_host += y.p[0]; }).find("use-after-poison") != std::string::npos);
#endif
}

/* ---- warps and atomics ------------------------------------------------------------------------------------------ */

static __global__ void k_shuffles(long long *y)
{
    int       t = (int)threadIdx.x;
    long long wide = (long long)t << 33;
    y[t]           = __shfl_sync(ALL, t, 5);
    y[32 + t]      = __shfl_sync(ALL, t, 3, 8);
    y[64 + t]      = __shfl_up_sync(ALL, t, 3u);
    y[96 + t]      = __shfl_down_sync(ALL, (float)t, 3u, 16);
    y[128 + t]     = __shfl_xor_sync(ALL, wide, 9) >> 33;
    y[160 + t]     = (long long)__shfl_xor_sync(ALL, (double)t, 16, 16);
    y[192 + t]     = __ballot_sync(ALL, t % 3 == 0);
    y[224 + t]     = __any_sync(ALL, t == 7) * 2 + __all_sync(ALL, t == 7);
    y[256 + t]     = t < 7 ? __reduce_add_sync(0x7fu, t) : __reduce_max_sync(0xffffff80u, t);
    y[288 + t]     = __syncthreads_count(t & 1) * 100 + __syncthreads_or(t == 9) * 10 + __syncthreads_and(t == 9);
    y[320 + t]     = t % 2 ? __shfl_xor_sync(0xaaaaaaaau, t, 2) : __shfl_xor_sync(0x55555555u, t, 4);
}

TEST(shuffles_votes_and_reductions)
{
    buffer<long long> y(352);
    for (unsigned order = 0; order < 5; order++) {
        cuda_on_cpu_order(order);
        RUN(k_shuffles, 1, 32, y.p);
        std::vector<long long> h = y.get();
        for (int t = 0; t < 32; t++) {
            ENSURE(h[t] == 5);
            ENSURE(h[32 + t] == t / 8 * 8 + 3);
            ENSURE(h[64 + t] == (t < 3 ? t : t - 3));
            ENSURE(h[96 + t] == (t % 16 + 3 > 15 ? t : t + 3));
            ENSURE(h[128 + t] == (t ^ 9));
            ENSURE(h[160 + t] == (t < 16 ? t : t - 16));    /* not beyond the end of one's part, but before it */
            ENSURE(h[192 + t] == 0x49249249);
            ENSURE(h[224 + t] == 2);
            ENSURE(h[256 + t] == (t < 7 ? 21 : 31));
            ENSURE(h[288 + t] == 1610);
            ENSURE(h[320 + t] == (t % 2 ? t ^ 2 : t ^ 4));
        }
    }
}

static __global__ void k_atomics(int *i, unsigned *u, float *f, double *d, unsigned long long *w)
{
    int t = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    atomicAdd(&i[0], t), atomicMax(&i[1], t), atomicMin(&i[2], -t), atomicCAS(&i[3], 0, 7);
    atomicOr(&u[0], 1u << t % 32), atomicAnd(&u[1], ~(1u << t % 16)), atomicInc(&u[2], 9u);
    if (t == 77) atomicExch(&u[3], 5u);
    atomicAdd(f, 1.0f), atomicAdd(d, 0.5), atomicAdd(w, 1ull << 33);
}

TEST(atomics)
{
    buffer<int>                i(4);
    buffer<unsigned>           u(4);
    buffer<float>              f(1);
    buffer<double>             d(1);
    buffer<unsigned long long> w(1);
    i.set({ 0, 0, 0, 0 }), u.set({ 0, ALL, 0, 0 }), f.set({ 0 }), d.set({ 0 }), w.set({ 0 });
    RUN(k_atomics, 4, 64, i.p, u.p, f.p, d.p, w.p);
    ENSURE(i.get() == (std::vector<int>{ 255 * 128, 255, -255, 7 }));
    ENSURE(u.get() == (std::vector<unsigned>{ ALL, 0xffff0000u, 256 % 10, 5 }));
    ENSURE(f.get()[0] == 256 && d.get()[0] == 128 && w.get()[0] == 256ull << 33);
}

TEST(bit_tricks)
{
    ENSURE(__popc(0xf0f0u) == 8 && __ffs(0x80) == 8 && __ffs(0) == 0 && __clz(1) == 31 && __clz(0) == 32);
    ENSURE(__brev(1u) == 0x80000000u && __umulhi(0x80000000u, 6u) == 3 && __popcll(~0ull) == 64);
    ENSURE(__byte_perm(0x33221100u, 0x77665544u, 0x6240u) == 0x66224400u && __mul24(-3, 5) == -15);
    ENSURE(__funnelshift_l(0x80000000u, 1u, 1) == 3 && __float_as_uint(1.0f) == 0x3f800000u && min(3, -4) == -4);
}

/* ---- 16-bit floats and tensor cores ----------------------------------------------------------------------------- */

TEST(bf16_and_f16_round_to_the_nearest_even)
{
    for (unsigned i = 0; i < 65536; i++) {
        unsigned short h = (unsigned short)i;
        float          b = __bfloat162float(__ushort_as_bfloat16(h)), f = __half2float(__ushort_as_half(h));
        bool           bf16_nan = (i & 0x7fff) > 0x7f80, f16_nan = (i & 0x7fff) > 0x7c00;
        ENSURE(bf16_nan ? b != b : b == ldexpf(i & 0x7f80 ? 128.0f + (float)(i & 127) : 2 * (float)(i & 127),
                                               (int)(i >> 7 & 255) - 134) * (i >> 15 ? -1.0f : 1.0f) || isinf(b));
        ENSURE(f16_nan ? f != f : f == ldexpf(i & 0x7c00 ? 1024.0f + (float)(i & 1023) : 2 * (float)(i & 1023),
                                              (int)(i >> 10 & 31) - 25) * (i >> 15 ? -1.0f : 1.0f) || isinf(f));
        ENSURE(__bfloat16_as_ushort(__float2bfloat16_rn(b)) == (bf16_nan ? 0x7fff : i));
        ENSURE(__half_as_ushort(__float2half_rn(f)) == (f16_nan ? 0x7fff : i));
        if ((i & 0x7fff) >= 0x7c00) continue;
        /* Half way to the next one: to the even one; a little beside it: to the near one. */
        unsigned next = i + 1, near_h = i & 1 ? next : i;
        float    above = __half2float(__ushort_as_half((unsigned short)next));
        float    m     = ((isinf(above) ? copysignf(65536, f) : above) + f) / 2;    /* exact */
        ENSURE(__half_as_ushort(__float2half_rn(m)) == near_h);
        ENSURE(__half_as_ushort(__float2half_rn(nextafterf(m, 0))) == i);
        ENSURE(__half_as_ushort(__float2half_rn(nextafterf(m, m < 0 ? -INFINITY : INFINITY))) == next);
        unsigned word = i << 16 | 0x8000;
        ENSURE(__bfloat16_as_ushort(__float2bfloat16_rn(__uint_as_float(word))) == near_h);
        ENSURE(__bfloat16_as_ushort(__float2bfloat16_rn(__uint_as_float(word - 1))) == i);
        ENSURE(__bfloat16_as_ushort(__float2bfloat16_rn(__uint_as_float(word + 1))) == next);
    }
}

/* One warp: y (16, 8) = a (16, K) b (K, 8), loaded as PTX's tables of fragments say, element by element. */
static __global__ void k_mma(float *y, const float *a, const float *b, int kind)
{
    unsigned g = threadIdx.x / 4, t = threadIdx.x % 4, x[4], z[2];
    float    d[4] = { 1, 1, 1, 1 };
    auto     half = [kind](float v) {
        return (unsigned)(kind ? __half_as_ushort(__float2half_rn(v)) : __bfloat16_as_ushort(__float2bfloat16_rn(v)));
    };
    auto     pair = [half](float lo, float hi) { return half(lo) | half(hi) << 16; };
    if (kind == 2) {
        x[0] = __float_as_uint(a[g * 8 + t]), x[1] = __float_as_uint(a[(g + 8) * 8 + t]);
        x[2] = __float_as_uint(a[g * 8 + t + 4]), x[3] = __float_as_uint(a[(g + 8) * 8 + t + 4]);
        z[0] = __float_as_uint(b[t * 8 + g]), z[1] = __float_as_uint(b[(t + 4) * 8 + g]);
        hpmlg_mma_1688_tf32(d, x, z);
    } else {
        const float *r = a + g * 16 + 2 * t, *s = b + 2 * t * 8 + g;
        x[0] = pair(r[0], r[1]), x[1] = pair(r[128], r[129]), x[2] = pair(r[8], r[9]), x[3] = pair(r[136], r[137]);
        z[0] = pair(s[0], s[8]), z[1] = pair(s[64], s[72]);
        hpmlg_mma_16816(d, x, z, kind == 1);
    }
    y[g * 8 + 2 * t] = d[0], y[g * 8 + 2 * t + 1] = d[1];
    y[(g + 8) * 8 + 2 * t] = d[2], y[(g + 8) * 8 + 2 * t + 1] = d[3];
}

TEST(tensor_cores_multiply_in_their_layout)
{
    buffer<float>      y(128), a(256), b(128);
    std::vector<float> x(256), z(128);
    for (int kind = 0; kind < 3; kind++) {
        int K = kind == 2 ? 8 : 16;
        for (int i = 0; i < 256; i++) x[i] = (float)(i * 37 % 101 - 50) / 8;
        for (int i = 0; i < 128; i++) z[i] = (float)(i * 29 % 67 - 33) / 4;
        a.set(x), b.set(z);
        RUN(k_mma, 1, 32, y.p, a.p, b.p, kind);
        std::vector<float> h = y.get();
        for (int i = 0; i < 16; i++)
            for (int j = 0; j < 8; j++) {
                float sum = 1;
                for (int k = 0; k < K; k++) sum += x[i * K + k] * z[k * 8 + j];     /* all exact */
                ENSURE(h[i * 8 + j] == sum);
            }
    }
}

static __global__ void k_ldmatrix(unsigned short *y)
{
    HPMLG_SHARED(unsigned short, s);                    /* four 8 x 8 matrices, the second half turned round */
    unsigned l = threadIdx.x, r[4];
    for (unsigned i = 0; i < 8; i++) s[l * 8 + i] = (unsigned short)(l * 8 + i);
    __syncwarp();
    for (unsigned trans = 0; trans < 2; trans++) {
        if (trans) hpmlg_ldmatrix_x4_trans(r, s + (l ^ 8) * 8);
        else hpmlg_ldmatrix_x4(r, s + (l ^ 8) * 8);
        for (unsigned m = 0; m < 4; m++) {
            y[((trans * 4 + m) * 32 + l) * 2]     = (unsigned short)r[m];
            y[((trans * 4 + m) * 32 + l) * 2 + 1] = (unsigned short)(r[m] >> 16);
        }
    }
}

TEST(matrix_loads)
{
    buffer<unsigned short> y(512);
    HPMLG_LAUNCH(k_ldmatrix, 1, 32, 512, (cudaStream_t)0, y.p);
    std::vector<unsigned short> h = y.get();
    for (int m = 0; m < 4; m++)
        for (int row = 0; row < 8; row++)
            for (int column = 0; column < 8; column++) {
                int value = ((m ^ 1) * 8 + row) * 8 + column;
                ENSURE(h[(m * 32 + row * 4 + column / 2) * 2 + column % 2] == value);
                ENSURE(h[((m + 4) * 32 + column * 4 + row / 2) * 2 + row % 2] == value);
            }
}

enum { SOUND, NO_WAIT, NO_COMMIT, WAITS_FOR_LESS, NO_BARRIER, LEAVES_EARLY, WRITES_EARLY };

static __global__ void k_copies(float *y, const float *x, int fault)
{
    HPMLG_SHARED(float4, s);
    int t = (int)threadIdx.x, n = (int)blockDim.x;
    hpmlg_copy_async16(&s[t], (const float4 *)x + t, true);
    hpmlg_copy_commit();
    hpmlg_copy_async16(&s[n + t], NULL, false);
    if (fault != NO_COMMIT) hpmlg_copy_commit();
    if (fault == WRITES_EARLY) s[t].x = 7;
    if (fault != NO_WAIT && fault != LEAVES_EARLY) hpmlg_copy_wait(fault == WAITS_FOR_LESS ? 1 : 0);
    if (fault != NO_BARRIER) __syncthreads();
    y[t] = s[n - 1 - t].x + s[n + t].y;
    hpmlg_copy_commit();
    if (fault != LEAVES_EARLY) hpmlg_copy_wait(0);
}

TEST(asynchronous_copies_land_late)
{
    buffer<float>      y(64), x(256);
    std::vector<float> v(256);
    for (int i = 0; i < 256; i++) v[i] = (float)i;
    x.set(v);
    for (int fault = SOUND; fault <= NO_BARRIER; fault++) {
        if (fault != SOUND) {
            RACES;
        }
        int order = y.differs([&] { HPMLG_LAUNCH(k_copies, 1, 64, 2048, (cudaStream_t)0, y.p, x.p, fault); });
        ENSURE(fault == SOUND ? order == -1 : order > 0);
        if (fault == SOUND) ENSURE(y.get()[3] == 240);
    }
    for (unsigned order = 0; order < 3; order++) {
        cuda_on_cpu_order(order);
        cuda_on_cpu_expect();
        HPMLG_LAUNCH(k_copies, 1, 64, 2048, (cudaStream_t)0, y.p, x.p, LEAVES_EARLY);
        CAUGHT("exits with 2 asynchronous copies");
        cuda_on_cpu_expect();
        HPMLG_LAUNCH(k_copies, 1, 64, 2048, (cudaStream_t)0, y.p, x.p, WRITES_EARLY);
        CAUGHT("before the asynchronous copy to it has arrived");
    }
    cuda_on_cpu_order(0);
}

/* ---- the runtime ------------------------------------------------------------------------------------------------ */

static __global__ void k_add(float *y, float v, int n)
{
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) y[i] += v;
}
static __global__ void k_double(float *y) { y[threadIdx.x] *= 2; }

TEST(launches_beyond_the_limits_are_refused)
{
    buffer<float> y(64);
    auto error = [&](dim3 grid, dim3 block, size_t shared) {
        HPMLG_LAUNCH(k_double, grid, block, shared, (cudaStream_t)0, y.p);
        cudaError_t peeked = cudaPeekAtLastError(), e = cudaGetLastError();
        return peeked == e && cudaGetLastError() == cudaSuccess ? e : cudaErrorUnknown;
    };
    ENSURE(error(1, 64, 0) == cudaSuccess);
    ENSURE(error(0, 64, 0) == cudaErrorInvalidConfiguration && error(1, 0, 0) == cudaErrorInvalidConfiguration);
    ENSURE(error(1, 1025, 0) == cudaErrorInvalidConfiguration);
    ENSURE(error(1, dim3(32, 33), 0) == cudaErrorInvalidConfiguration);
    ENSURE(error(dim3(1, 65536), 1, 0) == cudaErrorInvalidConfiguration);
    ENSURE(error(1, 64, 49153) == cudaErrorInvalidValue);
    const cudaFuncAttribute most = cudaFuncAttributeMaxDynamicSharedMemorySize;
    ENSURE(cudaFuncSetAttribute(k_double, most, 227 * 1024) == cudaSuccess);
    ENSURE(error(1, 64, 227 * 1024) == cudaSuccess && error(1, 64, 227 * 1024 + 1) == cudaErrorInvalidValue);
    ENSURE(cudaFuncSetAttribute(k_double, most, 228 * 1024) == cudaErrorInvalidValue);
    ENSURE(!strcmp(cudaGetErrorName(cudaErrorIllegalAddress), "cudaErrorIllegalAddress"));
}

TEST(memory_is_the_devices_or_the_hosts)
{
    buffer<float> y(64);
    float         h[64] = { 0 }, *pinned = NULL;
    ENSURE(cudaMemcpy(y.p, h, sizeof h, cudaMemcpyHostToDevice) == cudaSuccess);
    ENSURE(cudaMemcpy(y.p + 1, h, sizeof h, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
    ENSURE(cudaMemcpy(h, y.p, sizeof h, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
    ENSURE(cudaMemset(h, 0, 4) == cudaErrorInvalidValue);
    ENSURE(cudaFree(h) == cudaErrorInvalidValue && cudaFree(y.p + 1) == cudaErrorInvalidValue && !cudaFree(NULL));
    ENSURE(cudaMallocHost(&pinned, 256) == cudaSuccess && cudaFree(pinned) == cudaErrorInvalidValue);
    pinned[0] = 0;
    RUN(k_add, 1, 32, pinned, 2.0f, 1);
    ENSURE(pinned[0] == 2 && cudaFreeHost(pinned) == cudaSuccess);
    cuda_on_cpu_expect();
    RUN(k_add, 1, 32, h, 2.0f, 1);
    CAUGHT("k_add: argument 0 holds");
    RUN(k_add, 1, 32, y.p + 64, 2.0f, 0);               /* just behind an array: empty, but its own */
    cudaGetLastError();
    ENSURE(emu::all.bytes_live == 256 && emu::all.count.mallocs == 2 && emu::all.count.frees == 1);
}

TEST(a_missing_synchronisation_shows_when_work_is_held_back)
{
    buffer<float> y(1);
    float        *h = NULL;
    cudaStream_t  s, other;
    cudaEvent_t   e;
    cudaMallocHost(&h, sizeof *h), cudaEventCreateWithFlags(&e, cudaEventDisableTiming);
    cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking);
    for (unsigned lazy = 0; lazy < 5; lazy++) {
        cuda_on_cpu_lazy(lazy);
        *h = 7;
        cudaMemsetAsync(y.p, 0, 4, s);
        HPMLG_LAUNCH(k_add, 1, 1, 0, s, y.p, 3.0f, 1);
        cudaMemcpyAsync(h, y.p, 4, cudaMemcpyDeviceToHost, s);
        ENSURE(lazy > 1 || *h == (lazy ? 7 : 3));       /* the host has not waited */
        cudaEventRecord(e, s);
        cudaStreamWaitEvent(other, e);
        HPMLG_LAUNCH(k_double, 1, 1, 0, other, y.p);
        cudaMemcpyAsync(h, y.p, 4, cudaMemcpyDeviceToHost, other);
        long before = emu::all.count.synchronisations;
        ENSURE(cudaStreamSynchronize(other) == cudaSuccess);
        ENSURE(*h == 6 && emu::all.count.synchronisations == before + 1);
        HPMLG_LAUNCH(k_add, 1, 1, 0, s, y.p, 1.0f, 1);
        float pageable = 0;
        cudaMemcpyAsync(&pageable, y.p, 4, cudaMemcpyDeviceToHost, s);
        ENSURE(pageable == 7);
    }
    cudaStreamDestroy(s), cudaStreamDestroy(other), cudaEventDestroy(e), cudaFreeHost(h);
}

TEST(graphs_replay_what_was_recorded)
{
    buffer<float>   y(4);
    cudaStream_t    s, side;
    cudaEvent_t     fork_e, join_e;
    cudaGraph_t     g;
    cudaGraphExec_t x;
    cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking);
    cudaEventCreate(&fork_e), cudaEventCreate(&join_e);
    y.set({ 1, 1, 1, 1 });
    ENSURE(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    float v = 3;
    HPMLG_LAUNCH(k_add, 1, 4, 0, s, y.p, v, 4);
    v = 100;                                            /* arguments are taken at the launch */
    cudaEventRecord(fork_e, s), cudaStreamWaitEvent(side, fork_e);
    HPMLG_LAUNCH(k_double, 1, 4, 0, side, y.p);
    cudaEventRecord(join_e, side), cudaStreamWaitEvent(s, join_e);
    ENSURE(y.get()[0] == 1 || cudaPeekAtLastError());   /* nothing has run; cudaMemcpy is refused here */
    ENSURE(cudaGetLastError() == cudaErrorStreamCaptureUnsupported);
    ENSURE(cudaStreamEndCapture(s, &g) == cudaErrorStreamCaptureInvalidated && g == NULL);

    for (int joined = 0; joined < 2; joined++) {
        ENSURE(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
        HPMLG_LAUNCH(k_add, 1, 4, 0, s, y.p, 3.0f, 4);
        cudaEventRecord(fork_e, s), cudaStreamWaitEvent(side, fork_e);
        HPMLG_LAUNCH(k_double, 1, 4, 0, side, y.p);
        if (joined) cudaEventRecord(join_e, side), cudaStreamWaitEvent(s, join_e);
        ENSURE(cudaStreamEndCapture(s, &g) == (joined ? cudaSuccess : cudaErrorStreamCaptureUnjoined));
    }
    ENSURE(cudaGraphInstantiate(&x, g, 0) == cudaSuccess && cudaGraphDestroy(g) == cudaSuccess);
    ENSURE(y.get()[0] == 1);
    for (int i = 0; i < 3; i++) cudaGraphLaunch(x, s);
    ENSURE(cudaStreamSynchronize(s) == cudaSuccess && y.get()[3] == 50);
    ENSURE(emu::all.count.graph_launches == 3);
    cudaGraphExecDestroy(x), cudaStreamDestroy(s), cudaStreamDestroy(side);
    cudaEventDestroy(fork_e), cudaEventDestroy(join_e);
}

TEST(faults_at_will)
{
    buffer<float> y(4);
    float        *p = NULL;
    int           n = 9;
    emu::all.fail_malloc = 2;
    ENSURE(cudaMalloc(&p, 16) == cudaSuccess && cudaFree(p) == cudaSuccess);
    ENSURE(cudaMalloc(&p, 16) == cudaErrorMemoryAllocation && p == NULL);
    emu::all.memory = 100;
    ENSURE(cudaMalloc(&p, 101) == cudaErrorMemoryAllocation);
    ENSURE(cudaGetLastError() == cudaErrorMemoryAllocation);
    emu::all.wrong_image = true;
    RUN(k_double, 1, 4, y.p);
    ENSURE(cudaGetLastError() == cudaErrorNoKernelImageForDevice);
    cuda_on_cpu_reset();
    emu::all.fail_launch = 2;
    RUN(k_double, 1, 4, y.p);
    RUN(k_double, 1, 4, y.p);                           /* asynchronous: found out later, and for good */
    ENSURE(cudaGetLastError() == cudaSuccess);
    ENSURE(cudaDeviceSynchronize() == cudaErrorIllegalAddress);
    ENSURE(cudaMalloc(&p, 16) == cudaErrorIllegalAddress && cudaGetLastError() == cudaErrorIllegalAddress);
    ENSURE(cudaGetLastError() == cudaErrorIllegalAddress);
    cuda_on_cpu_reset();
    emu::all.absent = cudaErrorNoDevice;
    ENSURE(cudaGetDeviceCount(&n) == cudaErrorNoDevice && n == 0 && cudaSetDevice(0) == cudaErrorNoDevice);
    emu::all.absent = cudaErrorInsufficientDriver;
    ENSURE(cudaMalloc(&p, 16) == cudaErrorInsufficientDriver);
    cuda_on_cpu_reset();
    ENSURE(cudaSetDevice(1) == cudaErrorInvalidDevice && cudaGetDeviceCount(&n) == cudaSuccess && n == 1);
}

TEST(several_host_threads_launch)
{
    buffer<float>            y(4 * 256);
    std::vector<std::thread> hosts;
    cudaMemset(y.p, 0, 4 * 256 * sizeof(float));
    for (int h = 0; h < 4; h++)
        hosts.emplace_back([&y, h] {
            cudaStream_t s;
            cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);
            for (int i = 0; i < 50; i++) {
                HPMLG_LAUNCH(k_add, 1, 256, 0, s, y.p + h * 256, 1.0f, 256);
                HPMLG_LAUNCH((k_rounds<64>), 1, 64, 0, s, y.p + h * 256 + 64, true);
            }
            cudaStreamSynchronize(s);
            cudaStreamDestroy(s);
        });
    for (std::thread &t : hosts) t.join();
    std::vector<float> v = y.get();
    for (int h = 0; h < 4; h++) ENSURE(v[h * 256] == 50 && v[h * 256 + 64] == 4 * 37 + 64 * 6);
}
