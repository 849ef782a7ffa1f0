/* Hopper on a CPU, for tests: the functions of examples/hopper.h that are PTX instructions there, and those of the
   driver for tensor maps. Behind cuda_on_cpu.h, before hopper.h. The model is the PTX ISA's:
   - a phase of a barrier is complete when its arrivals and its bytes are; its bytes arrive as late as they may (order
     0), at once (1) or by chance;
   - TMA copies boxes of a matrix, zeros where the matrix ends, and exchanges pieces of 16 bytes by the swizzle, which
     depends on the address in shared memory;
   - wgmma reads its operands where its descriptors say, late, at once or by chance, and until it has been waited for;
     meanwhile its sums are NaN for the program.
   Errors: a barrier that was not initialized, with too many arrivals, or that nothing completes; a tile that a product
   reads although its threads have not waited for its arrival, or that is overwritten while a product reads it; sums
   that are touched too early; a missing fence, commit or wait; registers that a block does not have. */
#ifndef HOPPER_ON_CPU_H
#define HOPPER_ON_CPU_H
#include "cuda_on_cpu.h"

/* ---- tensor maps ------------------------------------------------------------------------------------------------ */

typedef uint32_t cuuint32_t;
typedef uint64_t cuuint64_t;
enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 };
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_32B, CU_TENSOR_MAP_SWIZZLE_64B,
                          CU_TENSOR_MAP_SWIZZLE_128B };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_64B,
                              CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };
struct CUtensorMap {
    const unsigned short *from;
    uint64_t columns, rows, pitch; /* pitch: bytes from row to row */
    uint64_t box_columns, box_rows, swizzle, rest[9];
};

/* Of bf16 matrices, with the limits of the driver's manual. */
inline CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType, cuuint32_t rank, void *from,
                                       const cuuint64_t *size, const cuuint64_t *pitch, const cuuint32_t *box,
                                       const cuuint32_t *every, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill)
{
    const uint64_t most = swizzle == CU_TENSOR_MAP_SWIZZLE_NONE ? 512 : (uint64_t)16 << swizzle;
    bool           good = rank == 2 && (uintptr_t)from % 16 == 0;
    for (int i = 0; i < 2; i++) {
        good &= size[i] > 0 && size[i] <= (uint64_t)1 << 32 && box[i] > 0 && box[i] <= 256;
        good &= every[i] == 1; /* others are not emulated */
    }
    good &= pitch[0] % 16 == 0 && pitch[0] < (uint64_t)1 << 40 && pitch[0] >= size[0] * 2;
    good &= box[0] * 2 % 16 == 0 && box[0] * 2 <= most;
    if (!good) return CUDA_ERROR_INVALID_VALUE;
    *map = { static_cast<unsigned short *>(from), size[0], size[1], pitch[0], box[0], box[1], (uint64_t)swizzle, {} };
    return CUDA_SUCCESS;
}

#define CUDART_VERSION 13000
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess, cudaDriverEntryPointSymbolNotFound };
enum { cudaEnableDefault = 0 };
inline cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **entry, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult *found)
{
    bool is_known = !strcmp(name, "cuTensorMapEncodeTiled");
    *entry = is_known ? reinterpret_cast<void *>(&cuTensorMapEncodeTiled) : nullptr;
    *found = is_known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

/* ---- the state of a block --------------------------------------------------------------------------------------- */

namespace emu {
constexpr unsigned shared_base = 1024;          /* where a block's own shared memory begins */
constexpr uint64_t barrier_mark = 0x6d62617272696572;

struct box_copy { CUtensorMap map; char *to; int x, y; };
struct mbarrier {
    unsigned count, pending, phase = 0;         /* arrivals of a phase, those that are missing, complete phases */
    long     bytes = 0;                         /* that are missing */
    bool     is_fenced = false;
    std::vector<box_copy> copies;               /* under way */
    std::vector<thread *> waiting;
};
struct piece {                                  /* 16 bytes of shared memory */
    const mbarrier *by;                         /* that counted their arrival, in this phase */
    unsigned        phase, readers;             /* products that may still read them */
    bool            is_under_way;
};
struct product { uint64_t a, b; bool add; };
struct warp_products {
    std::vector<product> list;                  /* that were not waited for */
    std::vector<size_t>  groups;                /* where each committed group of them ends */
    size_t               computed = 0, issued = 0; /* of the list; since the block began */
    bool                 is_fenced = false;
    float               *d[32];                 /* each lane's sums, while products are in flight; and their values */
    float                sums[16][256];
};
struct hopper_block {
    std::map<const void *, mbarrier> barriers;
    std::vector<piece>               pieces;
    warp_products                    warps[max_threads / 32];
    std::vector<product>             agreed[max_threads / 128]; /* what the first warp of a warpgroup issued */
    std::map<const mbarrier *, unsigned> seen[max_threads]; /* how many phases a thread knows to be complete */
    unsigned                         registers[max_threads / 128];
};
inline std::unique_ptr<hopper_block> hopper;
inline long products_issued = 0;                /* by all warps of all blocks; for tests */

inline unsigned block_registers(void) { return std::min(65536 / all.threads / 8 * 8, 255u); }
inline bool     by_chance(void) { return all.order == 1 || (all.order > 1 && draw(&all.random) & 1); }

inline void barrier_turn(mbarrier &b)           /* the phase, if it is complete */
{
    if (b.pending || b.bytes) return;
    b.phase++;
    b.pending = b.count;
    for (const thread *t : b.waiting) wake(t->warp, 1u << t->lane);
    b.waiting.clear();
}

inline unsigned swizzled(unsigned at, unsigned mode) /* mode: bits of an address that are changed: 0, 1, 2, 3 */
{
    return at ^ (at >> 7 & ((1u << mode) - 1)) << 4;
}

inline void copy_lands(mbarrier &b, const box_copy &c)
{
    const CUtensorMap &m = c.map;
    unsigned at = (unsigned)(c.to - all.shared) + shared_base;
    for (unsigned row = 0; row < m.box_rows; row++)
        for (unsigned column = 0; column < m.box_columns; column++, at += 2) {
            int64_t        y = (int64_t)c.y + row, x = (int64_t)c.x + column;
            unsigned short value = 0;
            if (y >= 0 && x >= 0 && (uint64_t)y < m.rows && (uint64_t)x < m.columns)
                value = m.from[(uint64_t)y * m.pitch / 2 + (uint64_t)x];
            unsigned to = swizzled(at, (unsigned)m.swizzle) - shared_base;
            memcpy(all.shared + to, &value, 2);
            hopper->pieces[to / 16] = { &b, b.phase, 0, false };
        }
    b.bytes -= (long)(m.box_rows * m.box_columns * 2);
}

inline void copies_land(mbarrier &b)
{
    std::vector<box_copy> copies;
    copies.swap(b.copies);
    for (const box_copy &c : copies) {
        copy_lands(b, c);
        barrier_turn(b);
    }
}
inline void awaited_copies_land(void)
{
    for (auto &b : hopper->barriers)
        if (!b.second.waiting.empty()) copies_land(b.second);
}

inline void hopper_begins(void)
{
    hopper.reset(new hopper_block());
    hopper->pieces.resize(all.shared_bytes / 16 + 1);
    for (unsigned &n : hopper->registers) n = block_registers();
}
inline void hopper_thread_ends(void)
{
    size_t n = hopper->warps[all.self->warp].list.size();
    if (n) error("exits with %zu products that it has not waited for", n);
    awaited_copies_land();
}
inline void hopper_ends(void)
{
    unsigned groups = (all.threads + 127) / 128, sum = 0;
    for (unsigned i = 0; i < groups; i++) sum += hopper->registers[i];
    if (sum > groups * block_registers())
        error("%s: a block takes %u registers, but has %u", all.kernel, sum * 128, groups * block_registers() * 128);
    for (const auto &b : hopper->barriers)
        if (!b.second.copies.empty())
            error("%s: a block ends before %zu of its copies have arrived", all.kernel, b.second.copies.size());
}
inline const bool hopper_hooks = [] {
    all.block_begins = hopper_begins;
    all.block_ends   = hopper_ends;
    all.thread_ends  = hopper_thread_ends;
    return true;
}();

/* ---- products --------------------------------------------------------------------------------------------------- */

/* Where the element lies that is number x of row y, in a tile whose rows are along k (K-major) or along m or n: the
   canonical layouts of the PTX ISA. The swizzle's mode in a descriptor: 0 none, 1 128, 2 64, 3 32 bytes. */
inline unsigned element_at(uint64_t descriptor, bool along_k, unsigned x, unsigned y)
{
    unsigned start = (unsigned)(descriptor & 0x3fff) << 4, leading = (unsigned)(descriptor >> 16 & 0x3fff) << 4;
    unsigned stride = (unsigned)(descriptor >> 32 & 0x3fff) << 4, mode = (4 - (unsigned)(descriptor >> 62)) & 3;
    unsigned width = 8u << mode;                /* numbers of a row of the swizzle */
    unsigned at = start + y % 8 * width * 2 + x % width * 2;
    if (mode == 0) at += along_k ? y / 8 * stride + x / 8 * leading : y / 8 * leading + x / 8 * stride;
    else at += y / 8 * stride + (along_k ? 0 : x / width * leading);
    return swizzled(at, mode);
}

/* What a warp reads of a (its 16 rows) and b (all), piece by piece. */
template <class F> inline void each_piece(const product &p, unsigned warp, const F &visit)
{
    for (unsigned y = 0; y < 16; y++)
        for (unsigned x = 0; x < 16; x += 8) visit(true, x, y, element_at(p.a, true, x, warp % 4 * 16 + y));
    for (unsigned y = 0; y < 16; y++)
        for (unsigned x = 0; x < 256; x += 8) visit(false, x, y, element_at(p.b, false, x, y));
}

inline void product_checks(uint64_t descriptor, int line)
{
    unsigned mode = (unsigned)(descriptor >> 62), repeat = mode ? 2048u >> mode : 16u;
    unsigned start = (unsigned)(descriptor & 0x3fff) << 4;
    if (descriptor & 0x3fffc000c000c000)
        error("wgmma (line %d): %016llx has bits that are not emulated", line, (unsigned long long)descriptor);
    if (start % repeat >= 128)
        error("wgmma (line %d): a tile at %u does not begin where the swizzle does", line, start);
}

/* Counts the warp as a reader of the pieces, all of which must have arrived, as far as each lane knows. */
inline void product_begins(const product &p, const thread *lanes, int line)
{
    product_checks(p.a, line);
    product_checks(p.b, line);
    each_piece(p, lanes->warp, [&](bool is_a, unsigned, unsigned, unsigned at) {
        const char *which = is_a ? "a" : "b";
        if (at < shared_base || at - shared_base + 16 > all.shared_bytes)
            error("wgmma (line %d): %s is read at %u, outside of shared memory", line, which, at);
        piece &q = hopper->pieces[(at - shared_base) / 16];
        q.readers++;
        for (unsigned l = 0; l < 32; l++) {
            auto seen = hopper->seen[lanes[l].warp * 32 + l].find(q.by);
            bool is_known = !q.by || (seen != hopper->seen[lanes[l].warp * 32 + l].end() && seen->second > q.phase);
            if (q.is_under_way || !is_known)
                error("wgmma (line %d): lane %u has not waited for the arrival of %s at %u", line, l, which, at);
        }
    });
}

inline float &sum_of(float (*sums)[256], unsigned lane, unsigned i) /* register i of a lane */
{
    return sums[lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2];
}
constexpr unsigned in_flight = 0x7fe1f1e1;      /* a NaN */
inline void sums_poison(warp_products &w)
{
    for (float *d : w.d)
        for (unsigned i = 0; i < 128; i++) d[i] = bits<float>(in_flight);
}
inline void sums_check(const warp_products &w, const char *op, int line)
{
    for (const float *d : w.d)
        for (unsigned i = 0; i < 128; i++)
            if (bits<unsigned>(d[i]) != in_flight) error("%s (line %d): a sum in flight was written", op, line);
}

EMU_QUICK void product_compute(const product &p, warp_products &w, unsigned warp)
{
    static float a[16][16], b[16][256];
    each_piece(p, warp, [](bool is_a, unsigned x, unsigned y, unsigned at) {
        unsigned words[4];
        memcpy(words, all.shared + at - shared_base, 16);
        mma_words(is_a ? &a[y][x] : &b[y][x], words, 4, true, nullptr);
    });
    for (unsigned row = 0; row < 16; row++) {
        double sum[256];
        for (unsigned c = 0; c < 256; c++) sum[c] = p.add ? (double)w.sums[row][c] : 0;
        for (unsigned k = 0; k < 16; k++)
            for (unsigned c = 0; c < 256; c++) sum[c] += (double)a[row][k] * (double)b[k][c];
        for (unsigned c = 0; c < 256; c++) {
            float v = (float)sum[c];
            w.sums[row][c] = __builtin_fabs(v) > __builtin_fabs(sum[c]) ? nextafterf(v, 0) : v; /* cut off */
        }
    }
}
inline void products_compute(warp_products &w, unsigned warp, size_t n) /* the first n of the list */
{
    for (; w.computed < n; w.computed++) product_compute(w.list[w.computed], w, warp);
}

struct product_io { float *d; product p; };

inline void product_issue(void **ios, int line)
{
    const thread     *lanes = &all.thread_of[all.self->warp * 32];
    const product_io *first = static_cast<product_io *>(ios[0]);
    warp_products    &w = hopper->warps[lanes->warp];
    auto             &agreed = hopper->agreed[lanes->warp / 4];
    auto is_same = [](const product &x, const product &y) { return x.a == y.a && x.b == y.b && x.add == y.add; };
    if (!w.is_fenced) error("wgmma (line %d) without a wgmma.fence before", line);
    for (unsigned l = 0; l < 32; l++)
        if (!is_same(static_cast<product_io *>(ios[l])->p, first->p)) error("wgmma (line %d): lanes disagree", line);
    if (agreed.size() == w.issued) agreed.push_back(first->p);
    if (!is_same(agreed[w.issued++], first->p)) error("wgmma (line %d): warps of a warpgroup disagree", line);
    if (w.list.empty())
        for (unsigned l = 0; l < 32; l++) {
            w.d[l] = static_cast<product_io *>(ios[l])->d;
            for (unsigned i = 0; i < 128; i++) sum_of(w.sums, l, i) = w.d[l][i];
        }
    else sums_check(w, "wgmma", line);
    for (unsigned l = 0; l < 32; l++)
        if (w.d[l] != static_cast<product_io *>(ios[l])->d)
            error("wgmma (line %d): other sums while products are in flight are not emulated", line);
    product_begins(first->p, lanes, line);
    products_issued++;
    sums_poison(w);
    w.list.push_back(first->p);
    if (by_chance()) products_compute(w, lanes->warp, w.list.size());
}

inline void products_wait(size_t groups_left, int line)
{
    unsigned       warp = all.self->warp;
    warp_products &w = hopper->warps[warp];
    if (w.groups.size() <= groups_left) return;
    size_t groups = w.groups.size() - groups_left, n = w.groups[groups - 1];
    sums_check(w, "wgmma.wait_group", line);
    products_compute(w, warp, n);
    for (size_t i = 0; i < n; i++)
        each_piece(w.list[i], warp, [](bool, unsigned, unsigned, unsigned at) {
            hopper->pieces[(at - shared_base) / 16].readers--;
        });
    w.list.erase(w.list.begin(), w.list.begin() + (long)n);
    w.groups.erase(w.groups.begin(), w.groups.begin() + (long)groups);
    for (size_t &end : w.groups) end -= n;
    w.computed -= n;
    if (!w.list.empty()) return;
    for (unsigned l = 0; l < 32; l++)
        for (unsigned i = 0; i < 128; i++) w.d[l][i] = sum_of(w.sums, l, i);
}

inline mbarrier &barrier_at(const char *op, int line, const uint64_t *p)
{
    auto b = hopper->barriers.find(p);
    if (b == hopper->barriers.end()) error("%s (line %d): no barrier was initialized at %p", op, line, (const void *)p);
    if (*p != barrier_mark) error("%s (line %d): the barrier at %p was overwritten", op, line, (const void *)p);
    return b->second;
}

inline void barrier_arrival(const char *op, int line, uint64_t *p, long bytes)
{
    mbarrier &b = barrier_at(op, line, p);
    if (!b.pending) error("%s (line %d): more than the %u arrivals of a phase", op, line, b.count);
    b.pending--;
    b.bytes += bytes;
    barrier_turn(b);
}

inline void registers_set(const char *op, int line, unsigned n, bool more)
{
    unsigned io = n;
    meet(op, line, full, &io, [](void **, unsigned) {});
    unsigned group = all.self->warp / 4, now = hopper->registers[group];
    if (n % 8 || n < 24 || n > 256 || (n != now && more != (n > now)))
        error("%s (line %d): %u registers after %u", op, line, n, now);
    hopper->registers[group] = n;
}
} // namespace emu

/* ---- the functions of hopper.h ---------------------------------------------------------------------------------- */

#define EMU_LINE int line = __builtin_LINE()
inline unsigned char *shared_ring(void) { return reinterpret_cast<unsigned char *>(emu::all.shared); }
inline unsigned       shared_at(const void *p)
{
    return (unsigned)(static_cast<const char *>(p) - emu::all.shared) + emu::shared_base;
}

inline void barrier_init(uint64_t *p, unsigned arrivals, EMU_LINE)
{
    if ((uintptr_t)p % 8 || arrivals == 0 || arrivals >= 1 << 20)
        emu::error("mbarrier.init (line %d): %u arrivals, at %p", line, arrivals, (void *)p);
    emu::mbarrier fresh = {};
    fresh.count = fresh.pending = arrivals;
    emu::hopper->barriers[p] = fresh;
    *p = emu::barrier_mark;
}
inline void barrier_init_fence(void)
{
    for (auto &b : emu::hopper->barriers) b.second.is_fenced = true;
}
inline void barrier_arrive(uint64_t *p, EMU_LINE) { emu::barrier_arrival("mbarrier.arrive", line, p, 0); }
inline void barrier_expect(uint64_t *p, unsigned bytes, EMU_LINE)
{
    emu::barrier_arrival("mbarrier.arrive.expect_tx", line, p, (long)bytes);
}
inline void barrier_wait(uint64_t *p, unsigned parity, EMU_LINE)
{
    const char    *op = "mbarrier.try_wait";
    emu::mbarrier &b = emu::barrier_at(op, line, p);
    emu::thread   *t = emu::all.self;
    while ((b.phase & 1) == parity) {
        emu::copies_land(b);
        emu::awaited_copies_land();
        if ((b.phase & 1) != parity) break;
        b.waiting.push_back(t);
        t->op = op, t->line = line, t->mask = 0;
        emu::wait();
    }
    emu::hopper->seen[t->warp * 32 + t->lane][&b] = b.phase;
}

inline void tma_load(void *to, const CUtensorMap *map, int x, int y, uint64_t *p, EMU_LINE)
{
    emu::mbarrier &b = emu::barrier_at("cp.async.bulk.tensor", line, p);
    size_t         at = (size_t)(static_cast<char *>(to) - emu::all.shared);
    size_t         bytes = map->box_rows * map->box_columns * 2;
    if (!b.is_fenced) emu::error("cp.async.bulk.tensor (line %d): no fence after the barrier's mbarrier.init", line);
    if (at % 128 || at + bytes > emu::all.shared_bytes)
        emu::error("cp.async.bulk.tensor (line %d): %zu bytes to shared memory at %zu", line, bytes, at);
    for (size_t i = at / 16; i < (at + bytes) / 16; i++) {
        emu::piece &q = emu::hopper->pieces[i];
        if (q.readers) emu::error("cp.async.bulk.tensor (line %d): writes a tile that a product still reads", line);
        if (q.is_under_way) emu::error("cp.async.bulk.tensor (line %d): two copies to the same place", line);
        q.is_under_way = true;
    }
    b.copies.push_back({ *map, static_cast<char *>(to), x, y });
    if (emu::by_chance()) emu::copies_land(b);
}

template <int n> inline void registers_give(EMU_LINE) { emu::registers_set("setmaxnreg.dec", line, n, false); }
template <int n> inline void registers_take(EMU_LINE) { emu::registers_set("setmaxnreg.inc", line, n, true); }

inline void wgmma_fence(EMU_LINE)
{
    emu::meet("wgmma.fence", line, emu::full, nullptr, [](void **, unsigned) {});
    emu::hopper->warps[emu::all.self->warp].is_fenced = true;
}
inline void wgmma_64x256x16(float (&d)[128], uint64_t a, uint64_t b, int add, EMU_LINE)
{
    emu::product_io io = { d, { a, b, add != 0 } };
    emu::meet("wgmma.mma_async", line, emu::full, &io, [line](void **ios, unsigned) { emu::product_issue(ios, line); });
}
inline void wgmma_commit(EMU_LINE)
{
    int io = 0;
    emu::meet("wgmma.commit_group", line, emu::full, &io, [](void **, unsigned) {
        emu::warp_products &w = emu::hopper->warps[emu::all.self->warp];
        w.groups.push_back(w.list.size());
    });
}
template <int n> inline void wgmma_wait(EMU_LINE)
{
    int io = 0;
    emu::meet("wgmma.wait_group", line, emu::full, &io, [line](void **, unsigned) { emu::products_wait(n, line); });
    emu::hopper->warps[emu::all.self->warp].is_fenced = false;
}
#undef EMU_LINE
#endif
