/* CUDA on a CPU, for tests: the kernel text of hpml_cuda.cuh compiled as C++17, each thread of a block a fiber.
       #define HPML_CUDA_ON_CPU
       #include "cuda_on_cpu.h"
       #include "cublas_on_cpu.h"
       #include "cudnn_on_cpu.h"
       #include "../../hpml_cuda.cuh"
   It shows what a GPU may hide for years:
   - a missing barrier: threads, warps and blocks run in many orders (compare the results, cuda_on_cpu_check), and a
     build with ThreadSanitizer reports any two accesses of a block that no barrier separates, with both lines;
   - a barrier or a warp operation that not all threads reach, a wait that is missing after an asynchronous copy, its
     memory written before it has arrived, or a thread that ends first;
   - out of bounds, by AddressSanitizer; reading memory before it is written: new memory is NaN;
   - a host pointer in a kernel, a device pointer on the host, a missing synchronisation: work may be held back;
   - leaks, and every error of the runtime at will.
   It cannot show speed or weak memory order. Blocks run one after another: a kernel whose blocks wait for each other
   does not end.

   Errors in kernels are printed and abort; between cuda_on_cpu_expect() and cuda_on_cpu_caught() they are kept and
   the kernel just ends. Orders: 0 ascending, 1 descending, 2.. random by that seed; also by CUDA_ON_CPU_ORDER.
   Kernels name their shared memory by HPMLG_SHARED or __shared__ (no extern). */
#ifndef CUDA_ON_CPU_H
#define CUDA_ON_CPU_H

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>
#include <tuple>
#include <type_traits>
#include <vector>
#include <sys/mman.h>

/* Functions are inline. With CUDA_ON_CPU_LINKED they are those of an object that is linked (build/emulator.o): then the
   compiler only reads them, which halves the time that a short file with kernels takes. */
#ifdef CUDA_ON_CPU_LINKED
#define EMU_FN extern inline __attribute__((gnu_inline))
#else
#define EMU_FN inline
#endif

#ifdef __has_feature
#  if __has_feature(address_sanitizer)
#    define CUDA_ON_CPU_ASAN 1
#  endif
#  if __has_feature(thread_sanitizer)
#    define CUDA_ON_CPU_TSAN 1
#  endif
#endif
#ifdef __SANITIZE_THREAD__
#  define CUDA_ON_CPU_TSAN 1
#endif
#ifdef __SANITIZE_ADDRESS__
#  define CUDA_ON_CPU_ASAN 1
#endif
#ifdef CUDA_ON_CPU_ASAN
#  include <sanitizer/asan_interface.h>
#  include <sanitizer/common_interface_defs.h>
#endif
#ifdef CUDA_ON_CPU_TSAN
#  include <sanitizer/tsan_interface.h>
extern "C" void AnnotateIgnoreReadsBegin(const char *, int), AnnotateIgnoreReadsEnd(const char *, int);
extern "C" void AnnotateIgnoreWritesBegin(const char *, int), AnnotateIgnoreWritesEnd(const char *, int);
#endif

/* ---- the language ----------------------------------------------------------------------------------------------- */

#define __global__ __attribute__((unused))
#define __device__ __attribute__((unused))
#define __constant__ __attribute__((unused))
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__
/* Static shared arrays are statics: kernels run one at a time. AddressSanitizer puts red zones around each of them;
   without it they stand in one section, so that they can be made NaN before each block. */
#ifdef CUDA_ON_CPU_ASAN
#  define __shared__ static
#else
#  define __shared__ static __attribute__((section("cuda_on_cpu_shared")))
extern "C" char __start_cuda_on_cpu_shared[] __attribute__((weak)), __stop_cuda_on_cpu_shared[] __attribute__((weak));
#endif
#define HPMLG_SHARED(type, name) type *name = reinterpret_cast<type *>(emu::all.shared)
#define HPMLG_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                                                \
    emu::launch(#kernel, kernel, grid, block, shared_bytes, stream, ##__VA_ARGS__)

struct uint3 { unsigned x, y, z; };
struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
inline uint3     threadIdx, blockIdx;
inline dim3      blockDim, gridDim;
constexpr int    warpSize = 32;

#define EMU_VECTOR(T, name)                                                                                         \
    struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                                              \
    struct name##3 { T x, y, z; };                                                                                  \
    struct alignas(sizeof(T) == 8 ? 16 : 4 * sizeof(T)) name##4 { T x, y, z, w; };                                  \
    inline name##2 make_##name##2(T x, T y) { return { x, y }; }                                                    \
    inline name##3 make_##name##3(T x, T y, T z) { return { x, y, z }; }                                            \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return { x, y, z, w }; }
EMU_VECTOR(float, float)
EMU_VECTOR(double, double)
EMU_VECTOR(int, int)
EMU_VECTOR(short, short)
EMU_VECTOR(unsigned short, ushort)
EMU_VECTOR(signed char, char)
EMU_VECTOR(unsigned char, uchar)
EMU_VECTOR(long long, longlong)
#undef EMU_VECTOR
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
EMU_FN uint2 make_uint2(unsigned x, unsigned y) { return { x, y }; }
EMU_FN uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return { x, y, z }; }
EMU_FN uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return { x, y, z, w }; }

enum cudaError_t {
    cudaSuccess                         = 0,
    cudaErrorInvalidValue               = 1,
    cudaErrorMemoryAllocation           = 2,
    cudaErrorInvalidConfiguration       = 9,
    cudaErrorInsufficientDriver         = 35,
    cudaErrorNoDevice                   = 100,
    cudaErrorInvalidDevice              = 101,
    cudaErrorNoKernelImageForDevice     = 209,
    cudaErrorInvalidResourceHandle      = 400,
    cudaErrorNotReady                   = 600,
    cudaErrorIllegalAddress             = 700,
    cudaErrorLaunchOutOfResources       = 701,
    cudaErrorLaunchFailure              = 719,
    cudaErrorStreamCaptureUnsupported   = 900,
    cudaErrorStreamCaptureInvalidated   = 901,
    cudaErrorStreamCaptureUnjoined      = 904,
    cudaErrorStreamCaptureIsolation     = 905,
    cudaErrorUnknown                    = 999
};

/* ---- fibers ----------------------------------------------------------------------------------------------------- */

namespace emu {

constexpr size_t   stack_bytes = 64 << 10;
constexpr unsigned max_threads = 1024, full = 0xffffffffu;

constexpr size_t   check_bytes = 256 << 10;    /* larger allocations are compared only if an argument points there */

/* A stack on which threads of a block run: one after another while none waits, each on its own once it does. */
struct fiber {
    void  *sp   = nullptr;     /* of a fiber that is switched away from */
    void  *fake = nullptr;     /* AddressSanitizer's */
    const void *bottom = nullptr;
    size_t bytes = 0, room = 0;
    fiber *next_idle = nullptr;
    void  *tsan = nullptr;      /* ThreadSanitizer's */
};

} // namespace emu

#if defined __x86_64__ && !defined CUDA_ON_CPU_UCONTEXT
/* Saves what a call must keep, changes the stack, takes the same from the other one. */
extern "C" void cuda_on_cpu_switch(void **save_sp, void *sp);
asm(".text\n.weak cuda_on_cpu_switch\n.type cuda_on_cpu_switch,@function\ncuda_on_cpu_switch:\n"
    "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
    "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
    "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n"
    ".size cuda_on_cpu_switch,.-cuda_on_cpu_switch\n");
namespace emu {
EMU_FN void fiber_begin(fiber *f, void (*main)(void))
{
    void **sp = reinterpret_cast<void **>(const_cast<char *>(static_cast<const char *>(f->bottom)) + f->room);
    *--sp = nullptr;                                       /* in place of a return address: the end of every trace */
    *--sp = reinterpret_cast<void *>(main);
    for (int i = 0; i < 6; i++) *--sp = nullptr;
    f->sp = sp;
}
EMU_FN void fiber_end(fiber *) {}
} // namespace emu
#else
#include <ucontext.h>
namespace emu {
EMU_FN void fiber_begin(fiber *f, void (*main)(void))
{
    ucontext_t *u = new ucontext_t;
    getcontext(u);
    u->uc_stack.ss_sp   = const_cast<void *>(f->bottom);
    u->uc_stack.ss_size = f->room;
    u->uc_link          = nullptr;
    makecontext(u, main, 0);
    f->sp = u;
}
EMU_FN void fiber_end(fiber *f) { delete static_cast<ucontext_t *>(f->sp), f->sp = nullptr; }
} // namespace emu
EMU_FN void cuda_on_cpu_switch(void **save_sp, void *sp)
{
    if (!*save_sp) *save_sp = new ucontext_t;
    swapcontext(static_cast<ucontext_t *>(*save_sp), static_cast<ucontext_t *>(sp));
}
#endif

namespace emu {

#ifdef CUDA_ON_CPU_ASAN
EMU_FN void fiber_arrived(void *fake);
#endif

EMU_FN void fiber_switch(fiber *from, fiber *to)
{
#ifdef CUDA_ON_CPU_ASAN
    __sanitizer_start_switch_fiber(&from->fake, to->bottom, to->bytes);
    cuda_on_cpu_switch(&from->sp, to->sp);
    fiber_arrived(from->fake);
#else
    cuda_on_cpu_switch(&from->sp, to->sp);
#endif
}

/* ---- the state of it all ---------------------------------------------------------------------------------------- */

struct copy16 { void *to; const void *from; bool valid, landed; char there[16]; }; /* there: what it found or left */

struct thread {
    uint3       idx;
    unsigned    lane, warp;
    fiber      *on;             /* NULL before it starts */
    const char *op;             /* what it waits in, NULL while it runs; "exit" at last */
    int         line;
    unsigned    mask;           /* of a warp operation */
    void       *io;
    std::vector<copy16> copies; /* asynchronous ones under way */
    std::vector<size_t> groups; /* where each committed group of them ends */
};

struct warp { unsigned live, ready, waiting; };     /* bit l: lane l; waiting: in a warp operation */

struct graph {
    std::vector<std::function<void()>> nodes;
    struct stream  *origin;
    std::thread::id thread;
    int             mode;
    bool            broken;
};

struct stream : std::enable_shared_from_this<stream> {
    std::deque<std::function<void()>> work;
    uint64_t pushed = 0, done = 0;
    bool     blocking = true;
    std::shared_ptr<bool> held;                     /* true: what it works on does not end */
    graph   *capture = nullptr;
    size_t   captured = 0, joined = 0;
    long     clock_us = 0;                          /* time of its work, where tests set the clock */
};

struct event : std::enable_shared_from_this<event> {
    std::shared_ptr<stream> on;
    uint64_t at = 0;
    size_t   captured = 0;
    graph   *capture = nullptr;
    double   ms = 0;
    bool     timed = true;
};

struct state {
    std::recursive_mutex mutex;

    /* what tests choose */
    unsigned    order = 0, lazy = 0;
    unsigned    check = 0;                          /* run every launch in so many orders and compare */
    const char *unordered = "";                     /* but these: names of kernels whose atomics deal out places */
    long        fail_malloc = 0, fail_launch = 0;   /* the k-th from now; 0: none */
    cudaError_t absent = cudaSuccess;               /* cudaErrorNoDevice, cudaErrorInsufficientDriver */
    bool        wrong_image = false;
    int         fail_capture = 0;                   /* bits: its beginning, what is recorded, its end, making it one
                                                       that can be launched, launching it */
    int         devices = 1, major = 9, minor = 0, sms = 132;
    size_t      memory = (size_t)80 << 30;
    bool        clock_set = false;                  /* events have the time stream::clock_us, not the host's */
    long        launch_us = 0;                      /* what a kernel's launch adds to that time */
    bool        expecting = false;
    char        caught[512] = "";

    /* what they ask */
    struct { long launches, graph_launches, kernels, threads, mallocs, frees, synchronisations, copies; } count = {};
    size_t      bytes_live = 0;

    /* the block that runs */
    const char *kernel = nullptr;
    const std::function<void()> *body = nullptr;
    char       *shared = nullptr;                   /* dynamic shared memory, and its bytes */
    size_t      shared_bytes = 0;
    thread     *self = nullptr;                     /* NULL: no kernel runs */
    unsigned    threads = 0, warps = 0, warp_now = 0, ready = 0, live = 0, arrived = 0, votes = 0, verdict = 0;
    thread     *first_arrived = nullptr, *first_exit = nullptr;
    bool        ended = false;                      /* by an error */
    uint64_t    random = 0, laziness = 0;           /* where the random numbers stand */
    thread      thread_of[max_threads];
    warp        warp_of[max_threads / 32];
    fiber       host, *now = nullptr, *idle = nullptr, *spent = nullptr;
    void      (*block_begins)(void) = nullptr, (*block_ends)(void) = nullptr, (*thread_ends)(void) = nullptr;
    std::vector<fiber *> fibers;

    /* the runtime */
    struct block_of { size_t bytes; bool device; };
    std::map<uintptr_t, block_of> memory_of;        /* live allocations by address */
    std::map<const void *, int>   shared_of;        /* raised limits of dynamic shared memory */
    std::shared_ptr<stream> null_stream = std::make_shared<stream>();
    std::vector<std::shared_ptr<stream>> streams;
    std::vector<std::shared_ptr<event>>  events;
    std::vector<graph *> captures;
    cudaError_t sticky = cudaSuccess;
    bool        sticky_seen = false;
    int         open = 0;                           /* device memory may be touched */

    state()
    {
        if (const char *s = getenv("CUDA_ON_CPU_ORDER")) order = (unsigned)atoi(s);
        if (const char *s = getenv("CUDA_ON_CPU_LAZY")) lazy = (unsigned)atoi(s);
        if (const char *s = getenv("CUDA_ON_CPU_CHECK")) check = (unsigned)atoi(s);
        if (const char *s = getenv("CUDA_ON_CPU_UNORDERED")) unordered = s;
        if (const char *s = getenv("CUDA_ON_CPU_SMS")) sms = atoi(s);
        if (const char *s = getenv("CUDA_ON_CPU_DEVICES")) devices = atoi(s);
        if (const char *s = getenv("CUDA_ON_CPU_MAJOR")) major = atoi(s);
        streams.push_back(null_stream);
    }
    ~state()
    {
        for (fiber *f : fibers) munmap(const_cast<void *>(f->bottom), f->bytes), delete f;
    }
};
inline state all;

#ifdef CUDA_ON_CPU_ASAN
EMU_FN void fiber_arrived(void *fake)                   /* the first of a launch comes from the host's stack */
{
    const void *bottom;
    size_t      bytes;
    __sanitizer_finish_switch_fiber(fake, &bottom, &bytes);
    if (!all.host.bottom) all.host.bottom = bottom, all.host.bytes = bytes;
}
#endif

EMU_FN void kernel_leave(void);

/* An error that a test plants is kept, any other ends the program. In a kernel this does not return. */
[[gnu::format(printf, 1, 2), gnu::cold, gnu::noinline]] inline void error(const char *format, ...)
{
    char    text[512];
    int     n = 0;
    va_list args;
    if (all.self)
        n = snprintf(text, sizeof text, "%s, block (%u,%u,%u), thread (%u,%u,%u): ", all.kernel, blockIdx.x, blockIdx.y,
                     blockIdx.z, all.self->idx.x, all.self->idx.y, all.self->idx.z);
    va_start(args, format);
    vsnprintf(text + n, sizeof text - (size_t)n, format, args);
    va_end(args);
    if (!all.expecting) {
        fprintf(stderr, "cuda_on_cpu: %s\n", text);
        fflush(stderr);
        abort();
    }
    if (!all.caught[0]) memcpy(all.caught, text, sizeof text);
    if (!all.self) return;
    all.ended = true;
    kernel_leave();
    fiber_switch(all.now, &all.host);
    abort();
}

EMU_FN uint64_t draw(uint64_t *state)                   /* splitmix64 */
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* ---- ThreadSanitizer: each thread of a block is one for it too -------------------------------------------------- */

/* What kernels do is put down to the thread that runs, what is done here to the host, whose accesses do not count
   meanwhile. Only barriers and __syncwarp order memory, blocks follow each other: so it reports any two accesses of a
   block that no barrier separates, whatever the order was. A thread keeps its stack for the whole block. */
#ifdef CUDA_ON_CPU_TSAN
EMU_FN void tsan_as(void *whom) { __tsan_switch_to_fiber(whom, __tsan_switch_to_fiber_no_sync); }
EMU_FN void kernel_leave(void) { tsan_as(all.host.tsan); }
EMU_FN void kernel_enter(void) { tsan_as(all.now->tsan); }
EMU_FN void kernel_start(void)
{
    char name[64];
    if (!all.now->tsan) all.now->tsan = __tsan_create_fiber(0);
    snprintf(name, sizeof name, "(%u,%u,%u)", threadIdx.x, threadIdx.y, threadIdx.z);
    __tsan_set_fiber_name(all.now->tsan, name);
    tsan_as(all.now->tsan);
    __tsan_acquire(&all.host);
}
EMU_FN void kernel_end(void)
{
    __tsan_release(&all.now);
    kernel_leave();
}
EMU_FN void block_begin(void) { __tsan_release(&all.host); }
EMU_FN void block_end(void)
{
    __tsan_acquire(&all.now);
    while (fiber *f = all.spent) all.spent = f->next_idle, f->next_idle = all.idle, all.idle = f;
}
EMU_FN void grid_begin(void)
{
    AnnotateIgnoreReadsBegin("", 0), AnnotateIgnoreWritesBegin("", 0);
    all.host.tsan = __tsan_get_current_fiber();
}
EMU_FN void grid_end(void) { AnnotateIgnoreReadsEnd("", 0), AnnotateIgnoreWritesEnd("", 0); }
/* All these threads, which wait, see what all of them have done. */
EMU_FN void memory_meets(thread *first, unsigned n, unsigned lanes, void *tag)
{
    for (int pass = 0; pass < 2; pass++)
        for (unsigned i = 0; i < n; i++) {
            if (!(lanes >> i % 32 & 1)) continue;
            tsan_as(first[i].on->tsan);
            if (pass) __tsan_acquire(tag);
            else __tsan_release(tag);
        }
    kernel_leave();
}
#else
EMU_FN void kernel_leave(void) {}
EMU_FN void kernel_enter(void) {}
EMU_FN void kernel_start(void) {}
EMU_FN void kernel_end(void) {}
EMU_FN void block_begin(void) {}
EMU_FN void block_end(void) {}
EMU_FN void grid_begin(void) {}
EMU_FN void grid_end(void) {}
EMU_FN void memory_meets(thread *, unsigned, unsigned, void *) {}
#endif

/* ---- the threads of a block ------------------------------------------------------------------------------------- */

EMU_FN unsigned choose(unsigned bits)                   /* one of the bits, by the order of this run */
{
    if (all.order == 0) return (unsigned)__builtin_ctz(bits);
    if (all.order == 1) return 31u - (unsigned)__builtin_clz(bits);
    unsigned turn = (unsigned)draw(&all.random) & 31;
    unsigned turned = bits >> turn | bits << ((32 - turn) & 31);
    return ((unsigned)__builtin_ctz(turned) + turn) & 31;
}

/* Who runs next. A warp runs as far ahead of the others as it can; in odd random orders they also mix at every turn. */
EMU_FN thread *pick(void)
{
    if (!all.ready) return nullptr;
    if (!(all.ready >> all.warp_now & 1) || (all.order > 2 && (all.order & 1))) all.warp_now = choose(all.ready);
    warp    &w    = all.warp_of[all.warp_now];
    unsigned lane = choose(w.ready);
    w.ready &= ~(1u << lane);
    if (!w.ready) all.ready &= ~(1u << all.warp_now);
    return &all.thread_of[all.warp_now * 32 + lane];
}

EMU_FN void wake(unsigned warp, unsigned lanes)
{
    all.warp_of[warp].ready |= lanes;
    all.ready |= 1u << warp;
}

EMU_FN void fiber_main(void);

EMU_FN fiber *fiber_take(void)
{
    if (!all.idle) {
        fiber *f  = new fiber;
        f->bytes  = stack_bytes;
        f->bottom = mmap(nullptr, f->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (f->bottom == MAP_FAILED) perror("cuda_on_cpu: stack"), abort();
        mprotect(const_cast<void *>(f->bottom), 4096, PROT_NONE);       /* overflow must not hit the next stack */
        f->room   = f->bytes - 128 * (all.fibers.size() % 61);          /* not all frames in the same cache lines */
        fiber_begin(f, fiber_main);
        all.fibers.push_back(f);
        return f;
    }
    fiber *f = all.idle;
    all.idle = f->next_idle;
    return f;
}

/* Called when no thread can run and some wait: reports the deadlock. */
[[gnu::cold]] inline void stuck(void)
{
    for (unsigned i = 0; i < all.threads; i++) {
        thread *t = &all.thread_of[i];
        if (!t->op || !strcmp(t->op, "exit")) continue;
        const thread *other = nullptr;
        for (unsigned j = 0; j < all.threads && !other; j++)
            if (all.thread_of[j].op && strcmp(all.thread_of[j].op, t->op)) other = &all.thread_of[j];
        all.self = t;
        if (!other) error("waits in %s (line %d) with mask %08x for ever", t->op, t->line, t->mask);
        error("waits in %s (line %d), but thread (%u,%u,%u) is in %s (line %d)", t->op, t->line, other->idx.x,
              other->idx.y, other->idx.z, other->op, other->line);
    }
}

EMU_FN void become(thread *t)
{
    all.self  = t;
    threadIdx = t->idx;
}

/* The running thread waits (it has written down for what); back when it may go on. */
EMU_FN void wait(void)
{
    thread *me = all.self, *next = pick();
    if (!next) stuck();
    if (next != me) {
        fiber *from = all.now;
        if (!next->on) next->on = fiber_take();
        become(next);
        all.now = next->on;
        fiber_switch(from, next->on);
    }
    me->op = nullptr;
}

EMU_FN void thread_exit(void)
{
    thread  *t   = all.self;
    warp    &w   = all.warp_of[t->warp];
    unsigned bit = 1u << t->lane;
    if (const thread *f = all.arrived ? all.first_arrived : nullptr)
        error("exits while thread (%u,%u,%u) waits in %s (line %d)", f->idx.x, f->idx.y, f->idx.z, f->op, f->line);
    for (unsigned left = w.waiting; left; left &= left - 1) {
        const thread *o = &all.thread_of[t->warp * 32 + (unsigned)__builtin_ctz(left)];
        if (o->mask & bit)
            error("exits, but lane %u names it in %s (line %d) with mask %08x", o->lane, o->op, o->line, o->mask);
    }
    if (!t->copies.empty())
        error("exits with %zu asynchronous copies that it has not waited for", t->copies.size());
    if (all.thread_ends) all.thread_ends();
    w.live &= ~bit;
    t->op   = "exit";
    t->copies.clear(), t->groups.clear();
    if (!all.first_exit) all.first_exit = t;
    all.live--;
}

EMU_FN void fiber_main(void)
{
#ifdef CUDA_ON_CPU_ASAN
    fiber_arrived(nullptr);
#endif
    for (;;) {
        kernel_start();
        (*all.body)();
        kernel_end();
        thread_exit();
        fiber  *me   = all.now;
        thread *next = pick();
        if (!next && all.live) stuck();
#ifdef CUDA_ON_CPU_TSAN
        me->next_idle = all.spent;
        all.spent     = me;
        if (next && !next->on) next->on = fiber_take();
#else
        if (next && !next->on) {                        /* it starts where this one ended: no switch */
            next->on = me;
            become(next);
            continue;
        }
        me->next_idle = all.idle;
        all.idle      = me;
#endif
        if (next) become(next);
        all.now = next ? next->on : &all.host;
        fiber_switch(me, all.now);
    }
}

/* An ended block leaves stacks in the middle of something. */
[[gnu::cold]] inline void fibers_reset(void)
{
    all.idle = all.spent = nullptr;
    for (fiber *f : all.fibers) {
#ifdef CUDA_ON_CPU_TSAN
        if (f->tsan) tsan_as(f->tsan), kernel_end(), __tsan_destroy_fiber(f->tsan), f->tsan = nullptr;
#endif
#ifdef CUDA_ON_CPU_ASAN
        __asan_unpoison_memory_region(static_cast<const char *>(f->bottom) + 4096, f->bytes - 4096);
#endif
        fiber_end(f);
        fiber_begin(f, fiber_main);
        f->next_idle = all.idle;
        all.idle     = f;
    }
}

EMU_FN void block_run(void)
{
    all.live = all.threads;
    all.arrived = all.votes = 0;
    all.first_exit = all.first_arrived = nullptr;
    all.warps = (all.threads + 31) / 32;
    all.ready = full >> (32 - all.warps);
    for (unsigned i = 0; i < all.threads; i++) {
        thread *t = &all.thread_of[i];
        t->on = nullptr, t->op = nullptr;
        t->copies.clear(), t->groups.clear();
    }
    for (unsigned i = 0; i < all.warps; i++) {
        unsigned lanes = std::min(32u, all.threads - 32 * i);
        all.warp_of[i].live = all.warp_of[i].ready = full >> (32 - lanes);
        all.warp_of[i].waiting = 0;
    }
    if (all.block_begins) all.block_begins();
    all.warp_now = choose(all.ready);
    thread *first = pick();
    first->on = fiber_take();
    become(first);
    all.now = first->on;
    block_begin();
    fiber_switch(&all.host, first->on);
    all.self = nullptr;
    if (all.block_ends && !all.ended) all.block_ends();
    if (all.ended) fibers_reset();
    block_end();
}

struct launch_of {
    const char *name;
    dim3        grid, block;
    size_t      shared;
    std::function<void()> body;
    std::vector<uintptr_t> named;       /* allocations that arguments point to */
};

EMU_FN void grid_run(const launch_of &l)
{
    const dim3    &g = l.grid, &b = l.block;
    const uint64_t blocks = (uint64_t)g.x * g.y * g.z;
    void          *shared = nullptr;
    grid_begin();
    if (posix_memalign(&shared, 1024, l.shared)) perror("cuda_on_cpu: shared memory"), abort();
    all.kernel = l.name;
    all.body   = &l.body;
    all.shared = static_cast<char *>(shared);
    all.shared_bytes = l.shared;
    all.ended  = false;
    all.random = all.order;
    all.threads = b.x * b.y * b.z;
    all.host.bottom = nullptr;
    gridDim = g, blockDim = b;
    for (unsigned i = 0; i < all.threads; i++) {
        thread *t = &all.thread_of[i];
        t->idx  = { i % b.x, i / b.x % b.y, i / b.x / b.y };
        t->lane = i % 32, t->warp = i / 32;
    }
    uint64_t step  = all.order > 1 ? draw(&all.random) % blocks | 1 : 1;
    uint64_t start = all.order > 1 ? draw(&all.random) % blocks : 0;
    while (std::gcd(step, blocks) != 1) step += 2;
    for (uint64_t i = 0; i < blocks && !all.ended; i++) {
        uint64_t n = all.order == 1 ? blocks - 1 - i : (uint64_t)(((unsigned __int128)i * step + start) % blocks);
        blockIdx = { (unsigned)(n % g.x), (unsigned)(n / g.x % g.y), (unsigned)(n / g.x / g.y) };
        memset(shared, 0xff, l.shared);
#ifndef CUDA_ON_CPU_ASAN
        if (__start_cuda_on_cpu_shared)
            memset(__start_cuda_on_cpu_shared, 0xff, (size_t)(__stop_cuda_on_cpu_shared - __start_cuda_on_cpu_shared));
#endif
        block_run();
    }
    free(shared);
    all.shared = nullptr;
    all.count.kernels++;
    all.count.threads += (long)(blocks * all.threads);
    grid_end();
}

/* The launch again in other orders, on the same memory: every byte of the device must come out the same. */
EMU_FN void grid_check(const launch_of &l)
{
    typedef std::vector<std::pair<const std::pair<const uintptr_t, state::block_of> *, std::vector<char>>> image;
    image before, first;
    auto  keep = [&l](image &to) {
        for (const auto &m : all.memory_of)
            if (m.second.bytes <= check_bytes || std::count(l.named.begin(), l.named.end(), m.first)) {
                const char *p = reinterpret_cast<const char *>(m.first);
                to.emplace_back(&m, std::vector<char>(p, p + m.second.bytes));
            }
    };
    const unsigned order = all.order;
    keep(before);
    grid_run(l);
    keep(first);
    for (unsigned i = 1; i < all.check && !all.ended; i++) {
        for (const auto &m : before) memcpy(reinterpret_cast<void *>(m.first->first), m.second.data(), m.second.size());
        all.order = order + i;
        grid_run(l);
        for (const auto &m : first) {
            const char *now = reinterpret_cast<const char *>(m.first->first);
            if (!m.first->second.device || !memcmp(now, m.second.data(), m.second.size())) continue;
            size_t at = (size_t)(std::mismatch(m.second.begin(), m.second.end(), now).first - m.second.begin());
            error("%s: order %u and order %u differ at byte %zu of the %zu at %p: a race, or atomics in turn", l.name,
                  order, all.order, at, m.second.size(), (const void *)now);
            break;
        }
    }
    all.order = order;
}

/* ---- barriers and warps ----------------------------------------------------------------------------------------- */

enum vote { vote_none, vote_count, vote_and, vote_or };

EMU_FN int barrier(const char *op, int line, int predicate)
{
    kernel_leave();
    thread *t = all.self;
    t->op = op, t->line = line;
    if (const thread *e = all.first_exit)
        error("waits in %s (line %d), but thread (%u,%u,%u) has exited", op, line, e->idx.x, e->idx.y, e->idx.z);
    if (!all.arrived) all.first_arrived = t;
    const thread *f = all.first_arrived;
    if (f->line != line || f->op != op)
        error("waits in %s (line %d), but thread (%u,%u,%u) waits in %s (line %d)", op, line, f->idx.x, f->idx.y,
              f->idx.z, f->op, f->line);
    all.votes += predicate != 0;
    if (++all.arrived == all.threads) {
        all.verdict = all.votes;
        all.arrived = all.votes = 0;
        memory_meets(all.thread_of, all.threads, full, &all.arrived);
        for (unsigned i = 0; i < all.warps; i++) wake(i, all.warp_of[i].live);
    }
    wait();
    kernel_enter();
    return (int)all.verdict;                            /* the next barrier is not complete before all have read this */
}

/* All lanes of the mask meet, each with its io; the last to come does the work of all: combine(ios, mask). Without an
   io (__syncwarp) their memory meets as well. */
template <class F> inline void meet(const char *op, int line, unsigned mask, void *io, const F &combine)
{
    kernel_leave();
    thread  *t   = all.self;
    warp    &w   = all.warp_of[t->warp];
    thread  *at  = &all.thread_of[t->warp * 32];
    unsigned bit = 1u << t->lane;
    if (!(mask & bit)) error("%s (line %d): mask %08x lacks the calling lane %u", op, line, mask, t->lane);
    if (mask & ~w.live)
        error("%s (line %d): mask %08x names lane %d, which has exited or never was", op, line, mask,
              __builtin_ctz(mask & ~w.live));
    if (unsigned others = w.waiting & mask) {
        const thread *o = &at[__builtin_ctz(others)];
        if (o->op != op || o->mask != mask)
            error("%s (line %d) with mask %08x meets lane %u in %s (line %d) with mask %08x", op, line, mask, o->lane,
                  o->op, o->line, o->mask);
    }
    t->op = op, t->line = line, t->mask = mask, t->io = io;
    w.waiting |= bit;
    if ((w.waiting & mask) == mask) {
        void *ios[32] = {};
        for (unsigned left = mask; left; left &= left - 1) {
            int l = __builtin_ctz(left);
            ios[l] = at[l].io;
        }
        combine(ios, mask);
        if (!io) memory_meets(at, 32, mask, &w);
        w.waiting &= ~mask;
        wake(t->warp, mask);
    }
    wait();
    kernel_enter();
}

template <class T> struct shuffled { T value, result; unsigned from; };

template <class T> inline T shuffle(const char *op, int line, unsigned mask, T value, unsigned from)
{
    static_assert(std::is_trivially_copyable<T>::value && sizeof(T) <= 8, "a type that shuffles take");
    shuffled<T> io = { value, value, from };
    meet(op, line, mask, &io, [op, line](void **ios, unsigned lanes) {
        for (unsigned left = lanes; left; left &= left - 1) {
            int          l  = __builtin_ctz(left);
            shuffled<T> *to = static_cast<shuffled<T> *>(ios[l]);
            if (!ios[to->from])
                error("%s (line %d): lane %d reads lane %u, which is not in the mask", op, line, l, to->from);
            to->result = static_cast<shuffled<T> *>(ios[to->from])->value;
        }
    });
    return io.result;
}

template <class T, class F> inline T reduce(const char *op, int line, unsigned mask, T value, const F &add)
{
    T io = value;
    meet(op, line, mask, &io, [&add](void **ios, unsigned lanes) {
        T sum = *static_cast<T *>(ios[__builtin_ctz(lanes)]);
        for (unsigned left = lanes & (lanes - 1); left; left &= left - 1)
            sum = add(sum, *static_cast<T *>(ios[__builtin_ctz(left)]));
        for (unsigned left = lanes; left; left &= left - 1) *static_cast<T *>(ios[__builtin_ctz(left)]) = sum;
    });
    return io;
}

EMU_FN unsigned lane(void) { return all.self->lane; }

} // namespace emu

#define EMU_LINE int line = __builtin_LINE()
EMU_FN void __syncthreads(EMU_LINE) { emu::barrier("__syncthreads", line, 0); }
EMU_FN int  __syncthreads_count(int p, EMU_LINE) { return emu::barrier("__syncthreads_count", line, p); }
EMU_FN int  __syncthreads_or(int p, EMU_LINE) { return emu::barrier("__syncthreads_or", line, p) > 0; }
EMU_FN int  __syncthreads_and(int p, EMU_LINE)
{
    return emu::barrier("__syncthreads_and", line, p) == (int)emu::all.threads;
}
EMU_FN void __syncwarp(unsigned mask = emu::full, EMU_LINE)
{
    emu::meet("__syncwarp", line, mask, nullptr, [](void **, unsigned) {});
}

template <class T> inline T __shfl_sync(unsigned mask, T v, int from, int width = 32, EMU_LINE)
{
    unsigned w = (unsigned)width, l = emu::lane();
    return emu::shuffle("__shfl_sync", line, mask, v, (l & ~(w - 1)) | ((unsigned)from & (w - 1)));
}
template <class T> inline T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32, EMU_LINE)
{
    unsigned w = (unsigned)width, l = emu::lane();
    return emu::shuffle("__shfl_up_sync", line, mask, v, (l & (w - 1)) < delta ? l : l - delta);
}
template <class T> inline T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32, EMU_LINE)
{
    unsigned w = (unsigned)width, l = emu::lane();
    return emu::shuffle("__shfl_down_sync", line, mask, v, (l & (w - 1)) + delta >= w ? l : l + delta);
}
template <class T> inline T __shfl_xor_sync(unsigned mask, T v, int with, int width = 32, EMU_LINE)
{
    unsigned w = (unsigned)width, l = emu::lane(), from = l ^ (unsigned)with;
    return emu::shuffle("__shfl_xor_sync", line, mask, v, from > (l | (w - 1)) ? l : from);
}
EMU_FN unsigned __ballot_sync(unsigned mask, int p, EMU_LINE)
{
    unsigned bit = p ? 1u << emu::lane() : 0u;
    return emu::reduce("__ballot_sync", line, mask, bit, [](unsigned a, unsigned b) { return a | b; });
}
EMU_FN int __any_sync(unsigned mask, int p, EMU_LINE)
{
    return emu::reduce("__any_sync", line, mask, p != 0, [](int a, int b) { return a | b; });
}
EMU_FN int __all_sync(unsigned mask, int p, EMU_LINE)
{
    return emu::reduce("__all_sync", line, mask, p != 0, [](int a, int b) { return a & b; });
}
#define EMU_REDUCE(name, T, expression)                                                                             \
    inline T name(unsigned mask, T v, EMU_LINE)                                                                     \
    {                                                                                                               \
        return emu::reduce(#name, line, mask, v, [](T a, T b) { return (T)(expression); });                         \
    }
EMU_REDUCE(__reduce_add_sync, unsigned, a + b)
EMU_REDUCE(__reduce_add_sync, int, (unsigned)a + (unsigned)b)
EMU_REDUCE(__reduce_max_sync, unsigned, a > b ? a : b)
EMU_REDUCE(__reduce_max_sync, int, a > b ? a : b)
EMU_REDUCE(__reduce_min_sync, unsigned, a < b ? a : b)
EMU_REDUCE(__reduce_min_sync, int, a < b ? a : b)
EMU_REDUCE(__reduce_or_sync, unsigned, a | b)
EMU_REDUCE(__reduce_and_sync, unsigned, a & b)
EMU_REDUCE(__reduce_xor_sync, unsigned, a ^ b)
#undef EMU_REDUCE
EMU_FN unsigned __activemask(void) { return emu::all.warp_of[emu::all.self->warp].live; }

/* ---- arithmetic ------------------------------------------------------------------------------------------------- */

namespace emu {
template <class To, class From> inline To bits(From from)
{
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
} // namespace emu

/* v as a device may have it that is right to so many units in the last place: up or down, by chance of its bits. What
   is exact there, 0 and 1, stays. */
namespace emu {
EMU_FN float near(float v, float units)
{
    unsigned u = bits<unsigned>(v), chance = u * 0x9e3779b1u >> 8;
    if (!(fabsf(v) >= 1e-37f) || fabsf(v) > 1e38f || v == 1) return v;
    return bits<float>(u + (unsigned)(int)lrintf(((float)chance / 8388608.0f - 1) * units));
}
} // namespace emu

EMU_FN int       __popc(unsigned x) { return __builtin_popcount(x); }
EMU_FN int       __popcll(unsigned long long x) { return __builtin_popcountll(x); }
EMU_FN int       __ffs(int x) { return __builtin_ffs(x); }
EMU_FN int       __ffsll(long long x) { return __builtin_ffsll(x); }
EMU_FN int       __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
EMU_FN int       __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
EMU_FN unsigned  __brev(unsigned x)
{
    unsigned r = 0;
    for (int i = 0; i < 32; i++) r = r << 1 | (x >> i & 1);
    return r;
}
EMU_FN unsigned  __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
EMU_FN int       __mulhi(int a, int b) { return (int)((int64_t)a * b >> 32); }
EMU_FN unsigned long long __umul64hi(unsigned long long a, unsigned long long b)
{
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
EMU_FN int       __mul24(int a, int b)
{
    return (int)((unsigned)((int)((unsigned)a << 8) >> 8) * (unsigned)((int)((unsigned)b << 8) >> 8));
}
EMU_FN unsigned  __umul24(unsigned a, unsigned b) { return (a & 0xffffff) * (b & 0xffffff); }
EMU_FN unsigned  __funnelshift_l(unsigned lo, unsigned hi, unsigned n)
{
    return (unsigned)(((uint64_t)hi << 32 | lo) << (n & 31) >> 32);
}
EMU_FN unsigned  __funnelshift_r(unsigned lo, unsigned hi, unsigned n)
{
    return (unsigned)(((uint64_t)hi << 32 | lo) >> (n & 31));
}
EMU_FN unsigned  __byte_perm(unsigned a, unsigned b, unsigned s)
{
    uint64_t v = (uint64_t)b << 32 | a;
    unsigned r = 0;
    for (unsigned i = 0; i < 4; i++) {
        unsigned byte = (unsigned)(v >> 8 * (s >> 4 * i & 7)) & 255;
        r |= (s >> 4 * i & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
    }
    return r;
}
EMU_FN float     __uint_as_float(unsigned x) { return emu::bits<float>(x); }
EMU_FN float     __int_as_float(int x) { return emu::bits<float>(x); }
EMU_FN unsigned  __float_as_uint(float x) { return emu::bits<unsigned>(x); }
EMU_FN int       __float_as_int(float x) { return emu::bits<int>(x); }
EMU_FN long long __double_as_longlong(double x) { return emu::bits<long long>(x); }
EMU_FN double    __longlong_as_double(long long x) { return emu::bits<double>(x); }
EMU_FN float     __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
EMU_FN float     __fadd_rn(float a, float b) { return a + b; }
EMU_FN float     __fsub_rn(float a, float b) { return a - b; }
EMU_FN float     __fmul_rn(float a, float b) { return a * b; }
EMU_FN float     __fdiv_rn(float a, float b) { return a / b; }
EMU_FN float     __fsqrt_rn(float a) { return sqrtf(a); }
EMU_FN float     __frsqrt_rn(float a) { return (float)(1 / sqrt((double)a)); }
EMU_FN float     __frcp_rn(float a) { return 1 / a; }
EMU_FN float     __fdividef(float a, float b) { return emu::near(a / b, 2); }
EMU_FN float     __expf(float a) { return emu::near(expf(a), 2 + 1.173f * fabsf(a)); }
EMU_FN float     __exp10f(float a) { return powf(10, a); }
EMU_FN float     __logf(float a) { return logf(a); }
EMU_FN float     __log2f(float a) { return log2f(a); }
EMU_FN float     __sinf(float a) { return sinf(a); }
EMU_FN float     __cosf(float a) { return cosf(a); }
EMU_FN float     __powf(float a, float b) { return powf(a, b); }
EMU_FN void      sincospi(double a, double *s, double *c) { *s = sin(M_PI * fmod(a, 2)), *c = cos(M_PI * fmod(a, 2)); }
EMU_FN float     __saturatef(float a) { return a > 0 ? a < 1 ? a : 1 : 0; }
EMU_FN float     rsqrtf(float a) { return emu::near(1 / sqrtf(a), 2); }
EMU_FN double    rsqrt(double a) { return 1 / sqrt(a); }
EMU_FN int       __float2int_rn(float a) { return (int)nearbyintf(a); }
EMU_FN int       __float2int_rz(float a) { return (int)a; }
EMU_FN unsigned  __float2uint_rn(float a) { return (unsigned)nearbyintf(a); }
EMU_FN float     __int2float_rn(int a) { return (float)a; }
EMU_FN float     __uint2float_rn(unsigned a) { return (float)a; }
#define EMU_MIN_MAX(T)                                                                                              \
    inline T min(T a, T b) { return b < a ? b : a; }                                                                \
    inline T max(T a, T b) { return a < b ? b : a; }
EMU_MIN_MAX(int)
EMU_MIN_MAX(unsigned)
EMU_MIN_MAX(long)
EMU_MIN_MAX(unsigned long)
EMU_MIN_MAX(long long)
EMU_MIN_MAX(unsigned long long)
#undef EMU_MIN_MAX
EMU_FN float     min(float a, float b) { return fminf(a, b); }
EMU_FN float     max(float a, float b) { return fmaxf(a, b); }
EMU_FN double    min(double a, double b) { return fmin(a, b); }
EMU_FN double    max(double a, double b) { return fmax(a, b); }
template <class T> inline T __ldg(const T *p) { return *p; }
template <class T> inline T __ldcs(const T *p) { return *p; }
template <class T> inline T __ldcg(const T *p) { return *p; }
template <class T> inline T __ldca(const T *p) { return *p; }
template <class T> inline void __stcs(T *p, T v) { *p = v; }
template <class T> inline void __stcg(T *p, T v) { *p = v; }
template <class T> inline void __stwt(T *p, T v) { *p = v; }
EMU_FN void      __threadfence(void) {}
EMU_FN void      __threadfence_block(void) {}
EMU_FN void      __threadfence_system(void) {}
EMU_FN long long clock64(void) { return (long long)std::chrono::steady_clock::now().time_since_epoch().count(); }
EMU_FN void      __trap(void) { emu::error("__trap"); }

namespace emu {
/* change(old) is stored and old returned, in one step. */
template <class T, class F> inline T atomic(T *p, const F &change)
{
    if ((uintptr_t)p % sizeof(T)) error("an atomic on a %zu-byte value at %p: not aligned", sizeof(T), (void *)p);
    T old, now;
    __atomic_load(p, &old, __ATOMIC_RELAXED);
    do now = change(old);
    while (!__atomic_compare_exchange(p, &old, &now, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED));
    return old;
}
} // namespace emu
#define EMU_ATOMIC(name, T, expression)                                                                             \
    inline T name(T *p, T v) { return emu::atomic(p, [v](T old) { return (T)(expression); }); }
#define EMU_ATOMICS(T)                                                                                              \
    EMU_ATOMIC(atomicMax, T, old < v ? v : old)                                                                     \
    EMU_ATOMIC(atomicMin, T, v < old ? v : old)                                                                     \
    EMU_ATOMIC(atomicOr, T, old | v)                                                                                \
    EMU_ATOMIC(atomicAnd, T, old & v)                                                                               \
    EMU_ATOMIC(atomicXor, T, old ^ v)                                                                               \
    EMU_ATOMIC(atomicExch, T, ((void)old, v))                                                                       \
    inline T atomicCAS(T *p, T expected, T v)                                                                       \
    {                                                                                                               \
        return emu::atomic(p, [=](T old) { return old == expected ? v : old; });                                    \
    }
EMU_ATOMICS(int)
EMU_ATOMICS(unsigned)
EMU_ATOMICS(unsigned long long)
EMU_ATOMIC(atomicExch, float, ((void)old, v))
EMU_ATOMIC(atomicAdd, int, (unsigned)old + (unsigned)v)
EMU_ATOMIC(atomicSub, int, (unsigned)old - (unsigned)v)
EMU_ATOMIC(atomicAdd, unsigned, old + v)
EMU_ATOMIC(atomicSub, unsigned, old - v)
EMU_ATOMIC(atomicInc, unsigned, old >= v ? 0 : old + 1)
EMU_ATOMIC(atomicDec, unsigned, old == 0 || old > v ? v : old - 1)
EMU_ATOMIC(atomicAdd, unsigned long long, old + v)
EMU_ATOMIC(atomicAdd, float, old + v)
EMU_ATOMIC(atomicAdd, double, old + v)
#undef EMU_ATOMICS
#undef EMU_ATOMIC

/* ---- 16-bit floats: to the nearest, ties to even; every NaN becomes 0x7fff, as on the device -------------------- */

struct __nv_bfloat16 { unsigned short __x; };
struct __half { unsigned short __x; };
struct alignas(4) __nv_bfloat162 { __nv_bfloat16 x, y; };
struct alignas(4) __half2 { __half x, y; };
typedef __half half;
typedef __half2 half2;
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;
typedef __nv_bfloat16 __nv_bfloat16_raw;
typedef __half __half_raw;

EMU_FN __nv_bfloat16 __float2bfloat16_rn(float f)
{
    unsigned u = emu::bits<unsigned>(f);
    if ((u & 0x7fffffff) > 0x7f800000) return { 0x7fff };
    return { (unsigned short)((u + 0x7fff + (u >> 16 & 1)) >> 16) };
}
EMU_FN float __bfloat162float(__nv_bfloat16 b) { return emu::bits<float>((unsigned)b.__x << 16); }
EMU_FN __half __float2half_rn(float f)
{
    unsigned u = emu::bits<unsigned>(f), sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000) return { 0x7fff };
    if (a >= 0x477ff000) return { (unsigned short)(sign | 0x7c00) };            /* 65520 and more round to infinity */
    if (a < 0x38800000) {                                                       /* subnormal: multiples of 2^-24 */
        float scaled = emu::bits<float>(a) * 16777216.0f;
        return { (unsigned short)(sign | (unsigned)nearbyintf(scaled)) };
    }
    a += 0xfff + (a >> 13 & 1);
    return { (unsigned short)(sign | (a - 0x38000000) >> 13) };
}
EMU_FN float __half2float(__half h)
{
    unsigned sign = (unsigned)(h.__x & 0x8000) << 16, e = h.__x >> 10 & 31, m = h.__x & 1023;
    if (e == 31) return emu::bits<float>(m ? 0x7fffffffu : sign | 0x7f800000);
    if (e == 0) return (sign ? -1.0f : 1.0f) * (float)m * 5.9604644775390625e-8f;
    return emu::bits<float>(sign | (e + 112) << 23 | m << 13);
}
#define EMU_16(T, T2, name, name2)                                                                                  \
    inline T      __float2##name(float f) { return __float2##name##_rn(f); }                                        \
    inline T      __ushort_as_##name(unsigned short u) { return { u }; }                                            \
    inline unsigned short __##name##_as_ushort(T h) { return h.__x; }                                               \
    inline T2     __halves2##name##2(T a, T b) { return { a, b }; }                                                 \
    inline T2     __floats2##name##2_rn(float a, float b)                                                           \
    {                                                                                                               \
        return { __float2##name##_rn(a), __float2##name##_rn(b) };                                                  \
    }                                                                                                               \
    inline T2     __float22##name##2_rn(float2 f) { return __floats2##name##2_rn(f.x, f.y); }                       \
    inline float2 __##name##22float2(T2 h) { return { __##name##2float(h.x), __##name##2float(h.y) }; }             \
    inline float  __low2float(T2 h) { return __##name##2float(h.x); }                                               \
    inline float  __high2float(T2 h) { return __##name##2float(h.y); }
EMU_16(__nv_bfloat16, __nv_bfloat162, bfloat16, bfloat162)
EMU_16(__half, __half2, half, half2)
#undef EMU_16

/* ---- tensor cores, matrix loads, asynchronous copies ------------------------------------------------------------ */

namespace emu {
struct mma { float *d; const unsigned *a, *b; };

/* Most of the time goes here: without the sanitizers, whose kernels' memory this is not. */
#ifdef __clang__
#  define EMU_QUICK __attribute__((no_sanitize("address", "undefined", "thread"), noinline)) inline
#else
#  define EMU_QUICK                                                                                                    \
    __attribute__((no_sanitize("address"), no_sanitize("undefined"), no_sanitize("thread"), optimize("O3"), noinline)) \
    inline
#endif
inline const std::vector<float> f16_values = [] {
    std::vector<float> v(65536);
    for (unsigned i = 0; i < 65536; i++) v[i] = __half2float(__half{ (unsigned short)i });
    return v;
}();
/* Of every word, `halves` (a table, NULL: bf16) the two numbers, or, with none, the one in tf32: the low 13 bits do not
   count. */
EMU_QUICK void mma_words(float *to, const unsigned *words, int n, bool halves, const float *f16)
{
    for (int i = 0; i < n; i++) {
        unsigned w = words[i], two[2] = { halves ? w << 16 : w & 0xffffe000u, w & 0xffff0000u };
        if (f16) to[2 * i] = f16[w & 0xffff], to[2 * i + 1] = f16[w >> 16];
        else if (halves) memcpy(to + 2 * i, two, 8);
        else memcpy(to + i, two, 4);
    }
}
/* d (16, 8) += a (16, K) b (K, 8): lane l holds rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next. */
template <int K> EMU_QUICK void mma_multiply(void **ios, const float (*a)[K], const float (*b)[8])
{
    for (int row = 0; row < 16; row++) {
        double sum[8] = {};
        for (int k = 0; k < K; k++)
            for (int c = 0; c < 8; c++) sum[c] += (double)a[row][k] * (double)b[k][c];
        for (int c = 0; c < 8; c++) {
            float *d = &static_cast<mma *>(ios[row % 8 * 4 + c / 2])->d[row / 8 * 2 + c % 2], v;
            sum[c] += *d, v = (float)sum[c];
            *d = __builtin_fabs(v) > __builtin_fabs(sum[c]) ? nextafterf(v, 0) : v; /* tensor cores cut off */
        }
    }
}
EMU_QUICK void mma_halves(void **ios, const float *f16)
{
    float x[16][16], y[16][8], v[8];
    for (unsigned l = 0; l < 32; l++) {
        mma_words(v, static_cast<mma *>(ios[l])->a, 4, true, f16);
        for (unsigned i = 0; i < 8; i++)                /* register i / 2: rows + 8 (odd), columns + 8 (2, 3) */
            x[l / 4 + i / 2 % 2 * 8][l % 4 * 2 + i % 2 + i / 4 * 8] = v[i];
        mma_words(v, static_cast<mma *>(ios[l])->b, 2, true, f16);
        for (unsigned i = 0; i < 4; i++) y[l % 4 * 2 + i % 2 + i / 2 * 8][l / 4] = v[i];
    }
    mma_multiply<16>(ios, x, y);
}
EMU_QUICK void mma_tf32(void **ios)
{
    float x[16][8], y[8][8], v[4];
    for (unsigned l = 0; l < 32; l++) {
        mma_words(v, static_cast<mma *>(ios[l])->a, 4, false, nullptr);
        for (unsigned i = 0; i < 4; i++) x[l / 4 + i % 2 * 8][l % 4 + i / 2 * 4] = v[i];
        mma_words(v, static_cast<mma *>(ios[l])->b, 2, false, nullptr);
        for (unsigned i = 0; i < 2; i++) y[l % 4 + i * 4][l / 4] = v[i];
    }
    mma_multiply<8>(ios, x, y);
}
template <bool trans> inline void ldmatrix(unsigned r[4], const void *row, int line)
{
    struct rows { unsigned *r; unsigned short row[8]; } io = { r, {} };
    if ((uintptr_t)row % 16) error("ldmatrix (line %d): row %p is not aligned to 16 bytes", line, row);
    memcpy(io.row, row, sizeof io.row);
    meet(trans ? "ldmatrix.trans" : "ldmatrix", line, full, &io, [](void **ios, unsigned) {
        for (unsigned l = 0; l < 32; l++)
            for (unsigned m = 0; m < 4; m++) {
                unsigned pair[2];
                for (unsigned i = 0; i < 2; i++) {
                    unsigned y = trans ? l % 4 * 2 + i : l / 4, x = trans ? l / 4 : l % 4 * 2 + i;
                    pair[i] = static_cast<rows *>(ios[m * 8 + y])->row[x];
                }
                static_cast<rows *>(ios[l])->r[m] = pair[0] | pair[1] << 16;
            }
    });
}
EMU_FN void copy_now(copy16 &c)
{
    if (c.valid) memcpy(c.to, c.from, 16);
    else memset(c.to, 0, 16);
    c.landed = true;
    memcpy(c.there, c.to, 16);
}
EMU_FN void copy_end(copy16 &c)
{
    if (memcmp(c.there, c.to, 16) != 0) error("writes %p before the asynchronous copy to it has arrived", c.to);
    if (!c.landed) copy_now(c);
}
} // namespace emu

/* mma.sync.aligned.m16n8k16.row.col.f32.{bf16,f16}: d += a b */
EMU_FN void hpmlg_mma_16816(float d[4], const unsigned a[4], const unsigned b[2], bool f16, EMU_LINE)
{
    emu::mma io = { d, a, b };
    emu::meet(f16 ? "mma.f16" : "mma.bf16", line, emu::full, &io, [f16](void **ios, unsigned) {
        emu::mma_halves(ios, f16 ? emu::f16_values.data() : nullptr);
    });
}
/* mma.sync.aligned.m16n8k8.row.col.f32.tf32: d += a b; the low 13 bits of a and b do not count */
EMU_FN void hpmlg_mma_1688_tf32(float d[4], const unsigned a[4], const unsigned b[2], EMU_LINE)
{
    emu::mma io = { d, a, b };
    emu::meet("mma.tf32", line, emu::full, &io, [](void **ios, unsigned) {
        emu::mma_tf32(ios);
    });
}
/* ldmatrix.sync.aligned.m8n8.x4.shared.b16: lanes 8 i .. 8 i + 7 give the rows of matrix i */
EMU_FN void hpmlg_ldmatrix_x4(unsigned r[4], const void *row, EMU_LINE) { emu::ldmatrix<false>(r, row, line); }
EMU_FN void hpmlg_ldmatrix_x4_trans(unsigned r[4], const void *row, EMU_LINE) { emu::ldmatrix<true>(r, row, line); }
/* cp.async: by order 0 the bytes move as late as they may, by order 1 at once, else by chance */
EMU_FN void hpmlg_copy_async16(void *shared, const void *global, bool valid)
{
    emu::thread *t = emu::all.self;
    if ((uintptr_t)shared % 16 || (valid && (uintptr_t)global % 16))
        emu::error("hpmlg_copy_async16: %p or %p is not aligned to 16 bytes", shared, global);
    emu::copy16 c = { shared, global, valid, false, {} };
    memcpy(c.there, shared, 16);
    emu::kernel_leave();
    bool now = emu::all.order == 1 || (emu::all.order > 1 && emu::draw(&emu::all.random) & 1);
    emu::kernel_enter();
    if (now) emu::copy_now(c);
    t->copies.push_back(c);
}
EMU_FN void hpmlg_copy_commit(void) { emu::all.self->groups.push_back(emu::all.self->copies.size()); }
EMU_FN void hpmlg_copy_wait(int pending)
{
    emu::thread *t = emu::all.self;
    if (t->groups.size() <= (size_t)pending) return;
    size_t groups = t->groups.size() - (size_t)pending, n = t->groups[groups - 1];
    for (size_t i = 0; i < n; i++) emu::copy_end(t->copies[i]);
    t->copies.erase(t->copies.begin(), t->copies.begin() + (long)n);
    t->groups.erase(t->groups.begin(), t->groups.begin() + (long)groups);
    for (size_t &end : t->groups) end -= n;
}

/* ---- the runtime: memory, streams, events, graphs --------------------------------------------------------------- */

typedef emu::stream *cudaStream_t;
typedef emu::event  *cudaEvent_t;
typedef emu::graph  *cudaGraph_t;
typedef std::vector<std::function<void()>> *cudaGraphExec_t;
enum cudaMemcpyKind { cudaMemcpyHostToHost, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice,
                      cudaMemcpyDefault };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal,
                             cudaStreamCaptureModeRelaxed };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
                         cudaFuncAttributePreferredSharedMemoryCarveout };
enum { cudaStreamDefault = 0, cudaStreamNonBlocking = 1, cudaEventDefault = 0, cudaEventBlockingSync = 1,
       cudaEventDisableTiming = 2, cudaHostAllocDefault = 0, cudaHostAllocPortable = 1, cudaHostAllocMapped = 2,
       cudaHostAllocWriteCombined = 4 };
struct cudaUUID_t { char bytes[16]; };
struct cudaDeviceProp {
    char   name[256];
    cudaUUID_t uuid;
    size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin, sharedMemPerMultiprocessor;
    int    major, minor, multiProcessorCount, warpSize, maxThreadsPerBlock, maxThreadsPerMultiProcessor, regsPerBlock;
    int    l2CacheSize, clockRate, memoryClockRate, memoryBusWidth, maxGridSize[3], maxThreadsDim[3], integrated;
};

namespace emu {

constexpr size_t shared_plain = 48 << 10, shared_most = 227 << 10;
inline thread_local cudaError_t last = cudaSuccess;     /* for cudaGetLastError */
inline thread_local int         device = 0;

EMU_FN cudaError_t fail(cudaError_t e) { return e == cudaSuccess || e == cudaErrorNotReady ? e : last = e; }

/* One call of the runtime: alone, and refused where there is no device, or none that is sound. */
struct call {
    std::lock_guard<std::recursive_mutex> hold{ all.mutex };
    cudaError_t refused = all.absent;
    call()
    {
        if (!refused && all.sticky_seen) refused = all.sticky;
        if (refused) last = refused;
    }
};

EMU_FN double clock_ms(const stream *s)
{
    if (all.clock_set) return 1e-3 * (double)s->clock_us;
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/* Only work on the device may touch its memory. Large allocations are left open: poisoning takes time. */
EMU_FN void memory_poison(uintptr_t p, const state::block_of &b, bool open)
{
#ifdef CUDA_ON_CPU_ASAN
    if (!b.device || b.bytes > (size_t)1 << 20) return;
    if (open) __asan_unpoison_memory_region(reinterpret_cast<void *>(p), b.bytes);
    else __asan_poison_memory_region(reinterpret_cast<void *>(p), b.bytes);
#else
    (void)p, (void)b, (void)open;
#endif
}

EMU_FN void memory_open(bool open)
{
    if (open ? all.open++ : --all.open) return;
    for (const auto &m : all.memory_of) memory_poison(m.first, m.second, open);
}

EMU_FN auto memory_find(const void *p)                  /* the allocation that holds this address */
{
    auto m = all.memory_of.upper_bound((uintptr_t)p);
    if (m == all.memory_of.begin()) return all.memory_of.end();
    --m;
    return (uintptr_t)p < m->first + std::max<size_t>(m->second.bytes, 1) ? m : all.memory_of.end();
}

/* May the device, or the host, touch these bytes? Both may touch pinned memory. */
EMU_FN bool memory_holds(const void *p, size_t bytes, bool device_side)
{
    auto m = memory_find(p);
    if (m == all.memory_of.end()) return !device_side;
    return (device_side || !m->second.device) && (uintptr_t)p + bytes <= m->first + m->second.bytes;
}

EMU_FN void stream_run(stream *s, uint64_t upto)
{
    while (s->done < upto && !(s->held && *s->held)) {
        std::function<void()> run = std::move(s->work.front());
        s->work.pop_front();
        if (!all.sticky) memory_open(true), run(), memory_open(false);
        s->done++;
    }
}

/* All streams; or those that the null stream waits for (and they for it): not made with cudaStreamNonBlocking. */
EMU_FN void streams_run(bool null_waits)
{
    for (const auto &s : all.streams)
        if (!null_waits || (s->blocking && s != all.null_stream)) stream_run(s.get(), s->pushed);
}

EMU_FN void seen(void) { all.sticky_seen = all.sticky != cudaSuccess, all.count.synchronisations++; }

EMU_FN stream *stream_of(cudaStream_t s) { return s ? s : all.null_stream.get(); }

EMU_FN void push(stream *s, std::function<void()> run)
{
    if (s->capture) {
        if (all.fail_capture & 2) s->capture->broken = true, fail(cudaErrorStreamCaptureUnsupported);
        s->capture->nodes.push_back(std::move(run));
        s->captured = s->capture->nodes.size();
        return;
    }
    stream *null = all.null_stream.get();
    if (s == null) run = [run] { streams_run(true), run(); };
    else if (s->blocking) stream_run(null, null->pushed);
    s->work.push_back(std::move(run));
    s->pushed++;
    if (!all.lazy) stream_run(s, s->pushed);
    if (all.lazy > 1)                                   /* by chance: some of the work of some stream */
        for (const auto &o : all.streams)
            stream_run(o.get(), o->done + draw(&all.laziness) % (o->pushed - o->done + 1));
}

/* What would wait for the device while work is recorded is refused, and the record is lost. */
EMU_FN bool while_capturing(stream *s = nullptr)
{
    bool unsafe = false;
    for (graph *g : all.captures)
        if (s ? s->capture == g
              : g->mode == cudaStreamCaptureModeGlobal ||
                    (g->mode == cudaStreamCaptureModeThreadLocal && g->thread == std::this_thread::get_id()))
            g->broken = unsafe = true;
    return unsafe;
}

/* Fills new memory with NaN: the first and the last 4 MiB, so that large allocations take no longer. */
EMU_FN void fill(void *p, size_t bytes)
{
    size_t n = std::min(bytes, (size_t)4 << 20);
    memset(p, 0xff, n);
    memset(static_cast<char *>(p) + bytes - n, 0xff, n);
}

EMU_FN cudaError_t allocate(void **p, size_t bytes, bool device_side)
{
    call c;
    if (c.refused) return c.refused;
    if (!p) return fail(cudaErrorInvalidValue);
    *p = nullptr;
    if (while_capturing()) return fail(cudaErrorStreamCaptureUnsupported);
    if (all.fail_malloc && --all.fail_malloc == 0) return fail(cudaErrorMemoryAllocation);
    if (bytes == 0) return cudaSuccess;
    if (device_side && all.bytes_live + bytes > all.memory) return fail(cudaErrorMemoryAllocation);
    if (posix_memalign(p, 256, bytes)) return *p = nullptr, fail(cudaErrorMemoryAllocation);
    fill(*p, bytes);
    all.memory_of[(uintptr_t)*p] = { bytes, device_side };
    all.bytes_live += bytes;
    all.count.mallocs++;
    if (!all.open) memory_poison((uintptr_t)*p, { bytes, device_side }, false);
    return cudaSuccess;
}

EMU_FN cudaError_t release(void *p, bool device_side)
{
    call c;
    if (!p) return c.refused;
    auto m = all.memory_of.find((uintptr_t)p);
    if (m == all.memory_of.end() || m->second.device != device_side) return fail(cudaErrorInvalidValue);
    if (while_capturing()) return fail(cudaErrorStreamCaptureUnsupported);
    streams_run(false);
    memory_poison(m->first, m->second, true);
    fill(p, m->second.bytes);
    all.bytes_live -= m->second.bytes;
    all.memory_of.erase(m);
    all.count.frees++;
    free(p);
    return c.refused;
}

EMU_FN bool pageable(const void *p) { return memory_find(p) == all.memory_of.end(); }

EMU_FN cudaError_t copy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, stream *s, bool sync)
{
    call c;
    if (c.refused) return c.refused;
    bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (kind == cudaMemcpyDefault) to_device = !pageable(to), from_device = !pageable(from);
    if (bytes && (!memory_holds(to, bytes, to_device) || !memory_holds(from, bytes, from_device)))
        return fail(cudaErrorInvalidValue);
    if (sync && while_capturing()) return fail(cudaErrorStreamCaptureUnsupported);
    all.count.copies++;
    push(s, [=] { if (bytes) memcpy(to, from, bytes); });
    if (s->capture || !(sync || pageable(to) || pageable(from))) return cudaSuccess;
    stream_run(s, s->pushed);                           /* pageable memory goes through the driver's own: it waits */
    seen();
    return all.sticky_seen ? fail(all.sticky) : cudaSuccess;
}

EMU_FN cudaError_t set(void *p, int value, size_t bytes, stream *s)
{
    call c;
    if (c.refused) return c.refused;
    if (bytes && (pageable(p) || !memory_holds(p, bytes, true))) return fail(cudaErrorInvalidValue);
    push(s, [=] { if (bytes) memset(p, value, bytes); });
    return cudaSuccess;
}

EMU_FN cudaError_t synchronise(stream *s, uint64_t upto)
{
    if (s) stream_run(s, upto);
    else streams_run(false);
    if (s && s->done < upto) error("the host waits, without a deadline, for a stream that does not end");
    seen();
    return all.sticky_seen ? fail(all.sticky) : cudaSuccess;
}

/* Is this a pointer, but not into (or just behind) memory of the device? Numbers that look alike are not mapped. */
EMU_FN bool host_pointer(uintptr_t p)
{
    if (p < 0x500000000000 || p >> 47) return false;    /* below lies what sanitizers keep to themselves */
    auto m = all.memory_of.upper_bound(p);
    if (m != all.memory_of.begin() && p <= std::prev(m)->first + std::prev(m)->second.bytes) return false;
    return msync(reinterpret_cast<void *>(p & ~(uintptr_t)4095), 1, MS_ASYNC) == 0;
}

EMU_FN void check_words(launch_of &l, int n, const void *words, size_t count, bool check)
{
    for (size_t i = 0; i < count; i++) {
        uintptr_t word;
        memcpy(&word, static_cast<const char *>(words) + 8 * i, 8);
        auto m = memory_find(reinterpret_cast<void *>(word));
        if (m != all.memory_of.end()) l.named.push_back(m->first);
        else if (check && host_pointer(word))
            error("%s: argument %d holds %p, which is not the device's memory", l.name, n, (void *)word);
    }
}

/* Pointers to data, alone or in structs, must be the device's; pointers to structs may be notes for the host. Padding
   may hold anything: where the compiler cannot clear it, structs go unchecked. */
template <class T> inline void check_argument(launch_of &l, int n, T value)
{
    typedef std::remove_pointer_t<T> to;
    bool check = std::is_pointer<T>::value && !std::is_class<to>::value;
#if defined __has_builtin
#  if __has_builtin(__builtin_clear_padding)
    if (std::is_class<T>::value) __builtin_clear_padding(&value), check = true;
#  endif
#endif
    check_words(l, n, static_cast<const void *>(&value), sizeof(T) / 8, check);
}

EMU_FN cudaError_t launch_check(const void *kernel, const launch_of &l)
{
    const dim3 &g = l.grid, &b = l.block;
    if (g.x == 0 || g.y == 0 || g.z == 0 || g.x > 0x7fffffff || g.y > 65535 || g.z > 65535 || b.x == 0 || b.y == 0 ||
        b.z == 0 || b.x > 1024 || b.y > 1024 || b.z > 64 || (uint64_t)b.x * b.y * b.z > max_threads)
        return cudaErrorInvalidConfiguration;
    auto   raised = all.shared_of.find(kernel);
    size_t limit  = raised == all.shared_of.end() ? shared_plain : std::max(shared_plain, (size_t)raised->second);
    if (l.shared > limit) return cudaErrorInvalidValue;
    return all.wrong_image ? cudaErrorNoKernelImageForDevice : cudaSuccess;
}

EMU_FN void launch_push(stream *on, const launch_of &l)
{
    all.count.launches++;
    bool fault = all.fail_launch && --all.fail_launch == 0;
    push(on, [to = on->shared_from_this(), l, fault] {
        to->clock_us += all.launch_us;
        if (fault) all.sticky = cudaErrorIllegalAddress;
        else if (all.check && !strstr(all.unordered, l.name)) grid_check(l);
        else grid_run(l);
    });
}

template <class... P, class... A>
void launch(const char *name, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, cudaStream_t on, A &&...args)
{
    call c;
    if (c.refused) return;
    std::tuple<std::decay_t<P>...> values(std::forward<A>(args)...);
    launch_of l = { name, grid, block, shared, [kernel, values] { std::apply(kernel, values); }, {} };
    if (fail(launch_check(reinterpret_cast<const void *>(kernel), l))) return;
    int n = 0;
    std::apply([&](const auto &...v) { (check_argument(l, n++, v), ...); }, values);
    launch_push(stream_of(on), l);
}

} // namespace emu

EMU_FN cudaError_t cudaGetDeviceCount(int *n)
{
    *n = emu::all.absent ? 0 : emu::all.devices;
    return emu::fail(emu::all.absent);
}
EMU_FN cudaError_t cudaSetDevice(int d)
{
    emu::call c;
    if (c.refused) return c.refused;
    if (d < 0 || d >= emu::all.devices) return emu::fail(cudaErrorInvalidDevice);
    emu::device = d;
    return cudaSuccess;
}
EMU_FN cudaError_t cudaGetDevice(int *d)
{
    emu::call c;
    *d = emu::device;
    return c.refused;
}
EMU_FN cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int d)
{
    emu::call c;
    if (c.refused) return c.refused;
    if (d < 0 || d >= emu::all.devices) return emu::fail(cudaErrorInvalidDevice);
    *p = {};
    snprintf(p->name, sizeof p->name, "CUDA on a CPU");
    p->uuid.bytes[0] = (char)d;
    p->totalGlobalMem = emu::all.memory, p->sharedMemPerBlock = emu::shared_plain;
    p->sharedMemPerBlockOptin = emu::shared_most, p->sharedMemPerMultiprocessor = emu::shared_most + 1024;
    p->major = emu::all.major, p->minor = emu::all.minor, p->multiProcessorCount = emu::all.sms, p->warpSize = 32;
    p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = 2048, p->regsPerBlock = 65536;
    p->l2CacheSize = 50 << 20, p->clockRate = 1980000, p->memoryClockRate = 2619000, p->memoryBusWidth = 5120;
    p->maxGridSize[0] = 0x7fffffff, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
    return cudaSuccess;
}
EMU_FN cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    emu::call c;
    *total = emu::all.memory, *free_bytes = emu::all.memory - std::min(emu::all.memory, emu::all.bytes_live);
    return c.refused;
}
EMU_FN cudaError_t cudaPeekAtLastError(void) { return emu::last; }
EMU_FN cudaError_t cudaGetLastError(void)
{
    cudaError_t e = emu::last;
    emu::last = emu::all.sticky_seen ? emu::all.sticky : cudaSuccess;
    return e;
}
namespace emu {
EMU_FN const char *error_text(cudaError_t e, bool name)
{
    static const struct { cudaError_t e; const char *name, *text; } table[] = {
#define EMU_ERROR(name, text) { name, #name, text },
        EMU_ERROR(cudaSuccess, "no error")
        EMU_ERROR(cudaErrorInvalidValue, "invalid argument")
        EMU_ERROR(cudaErrorMemoryAllocation, "out of memory")
        EMU_ERROR(cudaErrorInvalidConfiguration, "invalid configuration argument")
        EMU_ERROR(cudaErrorInsufficientDriver, "CUDA driver version is insufficient for CUDA runtime version")
        EMU_ERROR(cudaErrorNoDevice, "no CUDA-capable device is detected")
        EMU_ERROR(cudaErrorInvalidDevice, "invalid device ordinal")
        EMU_ERROR(cudaErrorNoKernelImageForDevice, "no kernel image is available for execution on the device")
        EMU_ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle")
        EMU_ERROR(cudaErrorNotReady, "device not ready")
        EMU_ERROR(cudaErrorIllegalAddress, "an illegal memory access was encountered")
        EMU_ERROR(cudaErrorLaunchOutOfResources, "too many resources requested for launch")
        EMU_ERROR(cudaErrorLaunchFailure, "unspecified launch failure")
        EMU_ERROR(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing")
        EMU_ERROR(cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture")
        EMU_ERROR(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work")
        EMU_ERROR(cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream")
#undef EMU_ERROR
    };
    for (const auto &t : table)
        if (t.e == e) return name ? t.name : t.text;
    return name ? "cudaErrorUnknown" : "unknown error";
}
} // namespace emu
EMU_FN const char *cudaGetErrorName(cudaError_t e) { return emu::error_text(e, true); }
EMU_FN const char *cudaGetErrorString(cudaError_t e) { return emu::error_text(e, false); }

template <class T> inline cudaError_t cudaMalloc(T **p, size_t n) { return emu::allocate((void **)p, n, true); }
template <class T> inline cudaError_t cudaMallocHost(T **p, size_t n) { return emu::allocate((void **)p, n, false); }
template <class T> inline cudaError_t cudaHostAlloc(T **p, size_t n, unsigned) { return cudaMallocHost(p, n); }
EMU_FN cudaError_t cudaFree(void *p) { return emu::release(p, true); }
EMU_FN cudaError_t cudaFreeHost(void *p) { return emu::release(p, false); }
EMU_FN cudaError_t cudaMemcpy(void *to, const void *from, size_t n, cudaMemcpyKind kind)
{
    return emu::copy(to, from, n, kind, emu::stream_of(nullptr), true);
}
EMU_FN cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, cudaMemcpyKind kind, cudaStream_t s = nullptr)
{
    return emu::copy(to, from, n, kind, emu::stream_of(s), false);
}
EMU_FN cudaError_t cudaMemset(void *p, int v, size_t n) { return emu::set(p, v, n, emu::stream_of(nullptr)); }
EMU_FN cudaError_t cudaMemsetAsync(void *p, int v, size_t n, cudaStream_t s = nullptr)
{
    return emu::set(p, v, n, emu::stream_of(s));
}
EMU_FN cudaError_t cudaDeviceSynchronize(void)
{
    emu::call c;
    if (c.refused) return c.refused;
    if (emu::while_capturing()) return emu::fail(cudaErrorStreamCaptureUnsupported);
    return emu::synchronise(nullptr, 0);
}

EMU_FN cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags)
{
    emu::call c;
    if (c.refused) return c.refused;
    emu::all.streams.push_back(std::make_shared<emu::stream>());
    *s = emu::all.streams.back().get();
    (*s)->blocking = !(flags & cudaStreamNonBlocking);
    return cudaSuccess;
}
EMU_FN cudaError_t cudaStreamCreate(cudaStream_t *s) { return cudaStreamCreateWithFlags(s, 0); }
EMU_FN cudaError_t cudaStreamDestroy(cudaStream_t s)
{
    emu::call c;
    auto &all = emu::all.streams;
    auto  at  = std::find_if(all.begin(), all.end(), [s](const auto &o) { return o.get() == s; });
    if (!s || at == all.end()) return emu::fail(cudaErrorInvalidResourceHandle);
    emu::stream_run(s, s->pushed);
    all.erase(at);
    return c.refused;
}
EMU_FN cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
    emu::call c;
    if (c.refused) return c.refused;
    if (emu::while_capturing(emu::stream_of(s))) return emu::fail(cudaErrorStreamCaptureUnsupported);
    return emu::synchronise(emu::stream_of(s), emu::stream_of(s)->pushed);
}
EMU_FN cudaError_t cudaStreamQuery(cudaStream_t on)             /* each time one piece of work more is done */
{
    emu::call    c;
    emu::stream *s = emu::stream_of(on);
    if (c.refused) return c.refused;
    if (emu::while_capturing(s)) return emu::fail(cudaErrorStreamCaptureUnsupported);
    if (s->done == s->pushed) return cudaSuccess;
    emu::stream_run(s, s->done + 1);
    return cudaErrorNotReady;
}

EMU_FN cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags)
{
    emu::call c;
    if (c.refused) return c.refused;
    emu::all.events.push_back(std::make_shared<emu::event>());
    *e = emu::all.events.back().get();
    (*e)->timed = !(flags & cudaEventDisableTiming);
    return cudaSuccess;
}
EMU_FN cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
EMU_FN cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    emu::call c;
    auto &all = emu::all.events;
    auto  at  = std::find_if(all.begin(), all.end(), [e](const auto &o) { return o.get() == e; });
    if (at == all.end()) return emu::fail(cudaErrorInvalidResourceHandle);
    all.erase(at);
    return c.refused;
}
EMU_FN cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t on = nullptr)
{
    emu::call    c;
    emu::stream *s = emu::stream_of(on);
    if (c.refused) return c.refused;
    e->on = s->shared_from_this(), e->capture = s->capture, e->captured = s->captured;
    if (s->capture) return cudaSuccess;
    e->at = s->pushed + 1;
    emu::push(s, [s, keep = e->shared_from_this()] { keep->ms = emu::clock_ms(s); });
    return cudaSuccess;
}
EMU_FN cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    emu::call c;
    if (c.refused) return c.refused;
    if (e->capture) return emu::while_capturing(), emu::fail(cudaErrorStreamCaptureUnsupported);
    return e->on ? emu::synchronise(e->on.get(), e->at) : cudaSuccess;
}
EMU_FN cudaError_t cudaEventQuery(cudaEvent_t e)
{
    emu::call c;
    if (c.refused) return c.refused;
    if (!e->on || e->on->done >= e->at) return cudaSuccess;
    emu::stream_run(e->on.get(), e->on->done + 1);
    return cudaErrorNotReady;
}
EMU_FN cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to)
{
    emu::call c;
    if (c.refused) return c.refused;
    if (!from->timed || !to->timed || !from->on || !to->on) return emu::fail(cudaErrorInvalidResourceHandle);
    if (from->on->done < from->at || to->on->done < to->at) return cudaErrorNotReady;
    *ms = (float)(to->ms - from->ms);
    return cudaSuccess;
}
EMU_FN cudaError_t cudaStreamWaitEvent(cudaStream_t on, cudaEvent_t e, unsigned = 0)
{
    emu::call    c;
    emu::stream *s = emu::stream_of(on);
    if (c.refused) return c.refused;
    if (e->capture) {                                   /* the stream joins what is being recorded */
        if (s->capture && s->capture != e->capture) return emu::fail(cudaErrorStreamCaptureIsolation);
        if (!s->capture) s->capture = e->capture, s->captured = s->joined = 0;
        e->on->joined = e->captured;
    } else if (s->capture) {
        return emu::fail(cudaErrorStreamCaptureIsolation);
    } else if (e->on) {
        emu::push(s, [s, o = e->on, at = e->at] {
            emu::stream_run(o.get(), at);
            if (o->done < at) s->held = o->held;
        });
    }
    return cudaSuccess;
}

EMU_FN cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode mode)
{
    emu::call c;
    if (c.refused) return c.refused;
    if (!s || s->capture) return emu::fail(s ? cudaErrorInvalidValue : cudaErrorStreamCaptureUnsupported);
    if (emu::all.fail_capture & 1) return emu::fail(cudaErrorStreamCaptureUnsupported);
    s->capture = new emu::graph{ {}, s, std::this_thread::get_id(), mode, false };
    emu::all.captures.push_back(s->capture);
    return cudaSuccess;
}
EMU_FN cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *out)
{
    emu::call   c;
    emu::graph *g = s ? s->capture : nullptr;
    cudaError_t e = c.refused;
    *out = nullptr;
    if (!g || g->origin != s) return emu::fail(e ? e : cudaErrorInvalidValue);
    auto &captures = emu::all.captures;
    captures.erase(std::find(captures.begin(), captures.end(), g));
    if (!e && (g->broken || emu::all.fail_capture & 4)) e = cudaErrorStreamCaptureInvalidated;
    for (const auto &o : emu::all.streams) {
        if (o->capture != g) continue;
        o->capture = nullptr;
        if (!e && o.get() != s && o->joined < o->captured) e = cudaErrorStreamCaptureUnjoined;
    }
    for (const auto &o : emu::all.events)
        if (o->capture == g) o->capture = nullptr, o->on = nullptr;
    if (e) delete g;
    else *out = g;
    return emu::fail(e);
}
EMU_FN cudaError_t cudaGraphInstantiate(cudaGraphExec_t *x, cudaGraph_t g, unsigned long long = 0)
{
    emu::call c;
    if (emu::all.fail_capture & 8) return emu::fail(cudaErrorMemoryAllocation);
    if (!c.refused) *x = new std::vector<std::function<void()>>(g->nodes);
    return c.refused;
}
EMU_FN cudaError_t cudaGraphLaunch(cudaGraphExec_t x, cudaStream_t s)
{
    emu::call c;
    if (c.refused) return c.refused;
    if (emu::all.fail_capture & 16) return emu::fail(cudaErrorInvalidValue);
    emu::all.count.graph_launches++;
    emu::push(emu::stream_of(s), [nodes = *x] {
        for (const auto &run : nodes)
            if (!emu::all.sticky) run();
    });
    return cudaSuccess;
}
EMU_FN cudaError_t cudaGraphDestroy(cudaGraph_t g) { return delete g, cudaSuccess; }
EMU_FN cudaError_t cudaGraphExecDestroy(cudaGraphExec_t x) { return delete x, cudaSuccess; }

template <class T> inline cudaError_t cudaFuncSetAttribute(T *kernel, cudaFuncAttribute a, int value)
{
    emu::call c;
    if (c.refused) return c.refused;
    if (emu::all.wrong_image) return emu::fail(cudaErrorNoKernelImageForDevice);
    if (value < 0 || (size_t)value > emu::shared_most) return emu::fail(cudaErrorInvalidValue);
    if (a == cudaFuncAttributeMaxDynamicSharedMemorySize)
        emu::all.shared_of[reinterpret_cast<const void *>(kernel)] = value;
    return cudaSuccess;
}
template <class T>
EMU_FN cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, T *, int threads, size_t shared)
{
    emu::call c;
    if (c.refused) return c.refused;
    if (threads < 1 || threads > 1024) return emu::fail(cudaErrorInvalidValue);
    size_t by_threads = (size_t)(2048 / ((threads + 31) / 32 * 32));
    size_t by_shared  = (emu::shared_most + 1024) / (shared + 1024);
    *blocks = (int)std::min({ by_threads, by_shared, (size_t)32 });
    return cudaSuccess;
}

/* ---- what tests ask for ----------------------------------------------------------------------------------------- */

/* 0 ascending, 1 descending, 2.. random by that seed: even ones let a warp run ahead, odd ones mix the warps. */
EMU_FN void cuda_on_cpu_order(unsigned order) { emu::all.order = order; }
/* From here on every launch runs in so many orders, and the device's memory must come out the same; also by
   CUDA_ON_CPU_CHECK. 0: off. CUDA_ON_CPU_UNORDERED names kernels whose atomics deal out places: they are left out. */
EMU_FN void cuda_on_cpu_check(unsigned orders) { emu::all.check = orders; }
/* 0: work on a stream runs at once; 1: only when the host waits for it; 2..: at random. */
EMU_FN void cuda_on_cpu_lazy(unsigned lazy) { emu::all.lazy = lazy, emu::all.laziness = lazy; }
/* Errors are kept from here on; caught() gives the first one's text, "" if there was none, and ends that. */
EMU_FN void cuda_on_cpu_expect(void) { emu::all.expecting = true, emu::all.caught[0] = 0; }
EMU_FN const char *cuda_on_cpu_caught(void)
{
    emu::all.expecting = false;
    return emu::all.caught;
}
/* All settings, counts and sticky errors as at the start; memory and streams stay. */
EMU_FN void cuda_on_cpu_reset(void)
{
    std::lock_guard<std::recursive_mutex> hold(emu::all.mutex);
    emu::state fresh, &all = emu::all;
    all.order = fresh.order, all.lazy = fresh.lazy, all.check = fresh.check, all.fail_malloc = all.fail_launch = 0;
    all.fail_capture = 0, all.clock_set = false, all.launch_us = 0;
    all.absent = cudaSuccess, all.wrong_image = all.expecting = false, all.major = 9, all.minor = 0;
    all.sms = fresh.sms, all.devices = fresh.devices, all.memory = fresh.memory, all.count = {};
    all.sticky = emu::last = cudaSuccess, all.sticky_seen = false;
}
/* Runs it in `orders` orders and compares what stands in the device's memory afterwards: -1 if it is always the same,
   else the first order that gives other bytes. */
template <class F> inline int cuda_on_cpu_differs(unsigned orders, const F &run, const void *out, size_t bytes)
{
    std::vector<char> first(bytes), now(bytes);
    unsigned before = emu::all.order;
    int      differs = -1;
    for (unsigned order = 0; order < orders && differs < 0; order++) {
        cuda_on_cpu_order(order);
        run();
        cudaDeviceSynchronize();
        cudaMemcpy(order ? now.data() : first.data(), out, bytes, cudaMemcpyDeviceToHost);
        if (order && memcmp(first.data(), now.data(), bytes)) differs = (int)order;
    }
    cuda_on_cpu_order(before);
    return differs;
}

#undef EMU_LINE
#endif
