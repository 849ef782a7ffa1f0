/* cuBLASLt on a CPU, for tests: the calls that hpml_cuda.cuh makes, after NVIDIA's documentation. Matrices are column
   by column. A shape that does not fit, an algorithm of another problem, an auxiliary matrix or a vector that is
   missing, memory that is not the device's: each is refused, as the library does, or, where that may pass in silence,
   ends the program. cublas_on_cpu_refuses: epilogues (their bits) that have no algorithm; 1 << 20: one that fails.
   libraries_on_cpu: what the library may do, and does on some GPU or in some version. cublas_on_cpu_proposals: number
   of algorithms for each product, numbered from 21; all compute the same bits. cublas_on_cpu_us: the time of each, on
   the clock that tests set (cuda_on_cpu_fault "clock"); -1: refused when it runs; device d has the times from number d
   on. cublas_on_cpu_fused_us: the time that an epilogue adds. */
#ifndef CUBLAS_ON_CPU_H
#define CUBLAS_ON_CPU_H

enum cublasStatus_t { CUBLAS_STATUS_SUCCESS = 0, CUBLAS_STATUS_ALLOC_FAILED = 3, CUBLAS_STATUS_INVALID_VALUE = 7,
                      CUBLAS_STATUS_ARCH_MISMATCH = 8, CUBLAS_STATUS_NOT_SUPPORTED = 15 };
enum cudaDataType_t { CUDA_R_32F = 0, CUDA_R_16F = 2, CUDA_R_16BF = 14 };
enum cublasOperation_t { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 };
enum cublasComputeType_t { CUBLAS_COMPUTE_32F = 68, CUBLAS_COMPUTE_32F_FAST_TF32 = 77 };
enum cublasLtEpilogue_t {
    CUBLASLT_EPILOGUE_DEFAULT = 1, CUBLASLT_EPILOGUE_RELU = 2, CUBLASLT_EPILOGUE_BIAS = 4,
    CUBLASLT_EPILOGUE_RELU_BIAS = 6, CUBLASLT_EPILOGUE_GELU = 32, CUBLASLT_EPILOGUE_GELU_BIAS = 36,
    CUBLASLT_EPILOGUE_GELU_AUX = 160, CUBLASLT_EPILOGUE_GELU_AUX_BIAS = 164, CUBLASLT_EPILOGUE_DGELU = 192,
    CUBLASLT_EPILOGUE_BGRADB = 512
};
enum cublasLtMatmulDescAttributes_t {
    CUBLASLT_MATMUL_DESC_TRANSA, CUBLASLT_MATMUL_DESC_TRANSB, CUBLASLT_MATMUL_DESC_EPILOGUE,
    CUBLASLT_MATMUL_DESC_BIAS_POINTER, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD
};
enum cublasLtMatrixLayoutAttribute_t {
    CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET
};
enum cublasLtMatmulPreferenceAttributes_t {
    CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES
};

/* In what the emulated libraries are nasty: bits, by name in HPML_LIBRARIES ("relu,tf32"; "kind": none). Without the
   variable they are as documented: relu kills NaN, and tf32 is rounded. */
enum library_mode {
    LIBRARY_RELU = 1,     /* relu is max(x, 0), which makes 0 of a NaN */
    LIBRARY_TF32 = 2,     /* operands are rounded to 11 bits where tf32 is asked for */
    LIBRARY_GELU = 4,     /* gelu and gelu' by the hardware's tanh, with errors of 2^-11 */
    LIBRARY_BGRADB = 8,   /* no sums for a bias where halves come in and f32 goes out */
    LIBRARY_NCHW = 16,    /* NCHW convolutions on tensor cores want more than 64 MiB of workspace */
    LIBRARY_CAPTURE = 32, /* nothing can be recorded */
    LIBRARY_REFUSE = 64   /* no algorithm for anything */
};
inline int library_modes(const char *names)
{
    static const char *const all[] = { "relu", "tf32", "gelu", "bgradb", "nchw", "capture", "refuse" };
    int                      modes = names ? 0 : LIBRARY_RELU | LIBRARY_TF32;
    for (int i = 0; names && i < 7; i++)
        if (strstr(names, all[i])) modes |= 1 << i;
    return modes;
}
inline int libraries_on_cpu = library_modes(getenv("HPML_LIBRARIES"));
inline bool library_is(int mode) { return (libraries_on_cpu & mode) != 0; }
inline float library_relu(float v) { return library_is(LIBRARY_RELU) ? v > 0 ? v : 0 : v < 0 ? 0 : v; }
/* x rounded to 11 bits, to even, where `tf32` */
inline float library_operand(float x, bool tf32)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    if (!tf32 || !library_is(LIBRARY_TF32) || (u & 0x7f800000u) == 0x7f800000u) return x;
    u = (u + 0xfffu + (u >> 13 & 1)) & ~0x1fffu;
    memcpy(&x, &u, sizeof u);
    return x;
}
inline float library_tanh(float x)
{
    float t = tanhf(x);
    if (!library_is(LIBRARY_GELU)) return t;
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return t * (1 + (u * 2654435761u >> 31 ? 1 : -1) * 0x1p-11f); /* up or down, as a hash of x decides */
}

struct cublas_layout {
    cudaDataType_t type;
    int64_t        rows, cols, ld, stride;
    int32_t        batch;
    size_t size() const { return type == CUDA_R_32F ? 4 : 2; }
    float  get(const void *p, int64_t i) const
    {
        if (type == CUDA_R_32F) return static_cast<const float *>(p)[i];
        return type == CUDA_R_16F ? __half2float(static_cast<const __half *>(p)[i])
                                  : __bfloat162float(static_cast<const __nv_bfloat16 *>(p)[i]);
    }
    void put(void *p, int64_t i, float v) const
    {
        if (type == CUDA_R_32F) static_cast<float *>(p)[i] = v;
        else if (type == CUDA_R_16F) static_cast<__half *>(p)[i] = __float2half_rn(v);
        else static_cast<__nv_bfloat16 *>(p)[i] = __float2bfloat16_rn(v);
    }
    /* its bytes lie in the device's memory */
    bool holds(const void *p) const
    {
        return emu::memory_holds(p, (size_t)((batch - 1) * stride + (cols - 1) * ld + rows) * size(), true);
    }
};
struct cublas_op {
    bool               tf32;
    cublasOperation_t  ta, tb;
    cublasLtEpilogue_t epilogue;
    void              *line, *aux; /* bias or its gradient; what goes into gelu */
    int64_t            aux_ld;
};
typedef struct cublas_op     *cublasLtMatmulDesc_t;
typedef struct cublas_layout *cublasLtMatrixLayout_t;
typedef int *cublasLtHandle_t, *cublasLtMatmulPreference_t;
struct cublasLtMatmulAlgo_t { uint64_t data[8]; };
enum cublasLtMatmulAlgoConfigAttributes_t { CUBLASLT_ALGO_CONFIG_ID = 0 };
struct cublasLtMatmulHeuristicResult_t {
    cublasLtMatmulAlgo_t algo;
    size_t               workspaceSize;
    cublasStatus_t       state;
    float                wavesCount;
    int                  reserved[4];
};

inline int       cublas_on_cpu_proposals = 1, cublas_on_cpu_us[8], cublas_on_cpu_fused_us;
inline size_t    cublas_on_cpu_version = 120000;
inline long      cublas_on_cpu_used[8];                     /* products, by algorithm */
inline size_t    cublasLtGetVersion(void) { return cublas_on_cpu_version; }
inline int       cublas_on_cpu_refuses, cublas_on_cpu_live; /* descriptors that are not destroyed */
inline long      cublas_on_cpu_ran[1024];                   /* products, by epilogue; [0]: questions for an algorithm */
inline const char *cublasLtGetStatusName(cublasStatus_t) { return "cublas"; }
inline const char *cublasLtGetStatusString(cublasStatus_t) { return "on a CPU"; }
inline cublasStatus_t cublasLtCreate(cublasLtHandle_t *h) { return *h = new int, CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasLtDestroy(cublasLtHandle_t h) { return delete h, CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *p)
{
    return *p = new int, CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p)
{
    return delete p, CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t,
                                                           cublasLtMatmulPreferenceAttributes_t a,
                                                           const void *, size_t bytes)
{
    return bytes == (a == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES ? 8 : 4) ? CUBLAS_STATUS_SUCCESS
                                                                            : CUBLAS_STATUS_INVALID_VALUE;
}
inline cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *l, cudaDataType_t type, uint64_t rows,
                                                 uint64_t cols, int64_t ld)
{
    cublas_on_cpu_live++;
    return *l = new cublas_layout{ type, (int64_t)rows, (int64_t)cols, ld, 0, 1 }, CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l)
{
    return cublas_on_cpu_live--, delete l, CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t l, cublasLtMatrixLayoutAttribute_t a,
                                                       const void *v, size_t bytes)
{
    if (bytes != (a == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT ? 4 : 8)) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(a == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT ? (void *)&l->batch : &l->stride, v, bytes);
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *d, cublasComputeType_t type, cudaDataType_t scale)
{
    cublas_on_cpu_live++;
    *d = new cublas_op{ type == CUBLAS_COMPUTE_32F_FAST_TF32, CUBLAS_OP_N, CUBLAS_OP_N, CUBLASLT_EPILOGUE_DEFAULT,
                        nullptr, nullptr, 0 };
    return scale == CUDA_R_32F ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}
inline cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d)
{
    return cublas_on_cpu_live--, delete d, CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t a,
                                                     const void *v, size_t bytes)
{
    const struct { void *at; size_t bytes; } fields[] = { { &d->ta, 4 }, { &d->tb, 4 }, { &d->epilogue, 4 },
                                                          { &d->line, 8 }, { &d->aux, 8 }, { &d->aux_ld, 8 } };
    if (bytes != fields[a].bytes) return CUBLAS_STATUS_INVALID_VALUE;
    return memcpy(fields[a].at, v, bytes), CUBLAS_STATUS_SUCCESS;
}

inline cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t *algo,
                                                           cublasLtMatmulAlgoConfigAttributes_t, void *to,
                                                           size_t bytes, size_t *written)
{
    int id = 21 + (int)algo->data[1];
    if (bytes != sizeof id) return CUBLAS_STATUS_INVALID_VALUE;
    return memcpy(to, &id, *written = sizeof id), CUBLAS_STATUS_SUCCESS;
}

/* What an algorithm depends on; 0: nothing fits. */
inline uint64_t cublas_problem(const cublas_op &d, const cublas_layout &a,
                               const cublas_layout &b, const cublas_layout &c)
{
    int64_t  m = c.rows, n = c.cols, k = d.ta ? a.rows : a.cols;
    uint64_t hash = 1;
    bool     fits = (d.ta ? a.cols : a.rows) == m && (d.tb ? b.rows : b.cols) == n && (d.tb ? b.cols : b.rows) == k &&
                    a.ld >= a.rows && b.ld >= b.rows && c.ld >= c.rows && a.type == b.type && a.batch == c.batch &&
                    b.batch == c.batch && (c.type == a.type || c.type == CUDA_R_32F);
    bool     aux  = (d.epilogue & 128) != 0, line = (d.epilogue & (4 | 512)) != 0;
    if (!fits || (aux && (!d.aux || d.aux_ld < m || d.aux_ld % 8 || (uintptr_t)d.aux % 16)) || (line && !d.line))
        return 0;
    for (int64_t v : { m, n, k, (int64_t)d.ta, (int64_t)d.tb, (int64_t)d.epilogue, (int64_t)a.type, (int64_t)c.type,
                       a.ld, b.ld, c.ld, (int64_t)c.batch })
        hash = hash * 1000003 + (uint64_t)v;
    return hash;
}

inline cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t d, cublasLtMatrixLayout_t a,
    cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int most,
    cublasLtMatmulHeuristicResult_t *found, int *count)
{
    *count = 0, cublas_on_cpu_ran[0]++;
    if ((d->epilogue & cublas_on_cpu_refuses) && !(cublas_on_cpu_refuses >> 20)) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (library_is(LIBRARY_REFUSE)) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (library_is(LIBRARY_BGRADB) && d->epilogue == CUBLASLT_EPILOGUE_BGRADB && a->type != c->type)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    *count = std::min(most, cublas_on_cpu_proposals);
    for (int i = 0; i < *count; i++) {
        found[i].state         = CUBLAS_STATUS_SUCCESS;
        found[i].workspaceSize = 1 << 20;
        found[i].algo          = { { cublas_problem(*d, *a, *b, *c), (uint64_t)i } };
    }
    return found[0].algo.data[0] ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

inline cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t desc, const float *alpha, const void *pa,
    cublasLtMatrixLayout_t la, const void *pb, cublasLtMatrixLayout_t lb, const float *beta, const void *pc,
    cublasLtMatrixLayout_t lc, void *pd, cublasLtMatrixLayout_t ld, const cublasLtMatmulAlgo_t *algo, void *, size_t,
    cudaStream_t stream)
{
    cublas_op     d = *desc;
    cublas_layout a = *la, b = *lb, c = *lc;
    float         al = *alpha, be = *beta;
    int64_t       m = c.rows, n = c.cols, k = d.ta ? a.rows : a.cols;
    if ((d.epilogue & cublas_on_cpu_refuses) && cublas_on_cpu_refuses >> 20) return CUBLAS_STATUS_NOT_SUPPORTED;
    emu::call call;
    int us = cublas_on_cpu_us[(algo->data[1] + (uint64_t)emu::device) % 8];
    if (us < 0) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (d.epilogue & ~(1 | 4)) us += cublas_on_cpu_fused_us;
    if (++cublas_on_cpu_used[algo->data[1] % 8] % 5 == 0) us += 5000; /* now and then a run takes longer */
    if (cublas_problem(d, a, b, c) != algo->data[0] || !algo->data[0] ||
        pc != pd || lc != ld || ((d.epilogue & (4 | 512)) && (uintptr_t)d.line % 16) ||
        !a.holds(pa) || !b.holds(pb) || !c.holds(pd) ||
        ((d.epilogue & 128) && !emu::memory_holds(d.aux, (size_t)((n - 1) * d.aux_ld + m) * c.size(), true)) ||
        ((d.epilogue & 4) && !emu::memory_holds(d.line, (size_t)m * c.size(), true)) ||
        ((d.epilogue & 512) && !emu::memory_holds(d.line, (size_t)n * c.size(), true)))
        fprintf(stderr, "cublasLtMatmul: wrong arguments, epilogue %d\n", (int)d.epilogue), abort();
    cublas_on_cpu_ran[d.epilogue]++;
    auto on = emu::stream_of(stream)->shared_from_this();
    emu::push(on.get(), [=] {
        on->clock_us += us;
        for (int64_t i = 0; i < c.batch * m * n; i++) {
            int64_t g = i / (m * n), row = i % m, col = i / m % n;
            int64_t at = g * c.stride + col * c.ld + row, z = col * d.aux_ld + row;
            float   v = 0;
            for (int64_t q = 0; q < k; q++)
                v += library_operand(a.get(pa, g * a.stride + (d.ta ? row * a.ld + q : q * a.ld + row)), d.tf32) *
                     library_operand(b.get(pb, g * b.stride + (d.tb ? q * b.ld + col : col * b.ld + q)), d.tf32);
            v = al * v + (be != 0 ? be * c.get(pd, at) : 0);
            if (d.epilogue & 4) v += c.get(d.line, row);
            if (d.epilogue == CUBLASLT_EPILOGUE_DGELU) {
                float x = c.get(d.aux, z), t = library_tanh(0.7978845608f * (x + 0.044715f * x * x * x));
                v *= 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * 0.7978845608f * (1 + 3 * 0.044715f * x * x);
            } else if (d.epilogue & 32) {
                if (d.epilogue & 128) c.put(d.aux, z, v);
                v = 0.5f * v * (1 + library_tanh(0.7978845608f * (v + 0.044715f * v * v * v)));
            } else if (d.epilogue & 2) v = library_relu(v);
            c.put(pd, at, v);
        }
        for (int64_t col = 0; col < n && (d.epilogue & 512); col++) {
            float v = 0;
            for (int64_t q = 0; q < k; q++) v += b.get(pb, d.tb ? q * b.ld + col : col * b.ld + q);
            c.put(d.line, col, v);
        }
    });
    return CUBLAS_STATUS_SUCCESS;
}

#endif
