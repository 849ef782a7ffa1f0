/* cuDNN's convolutions on a CPU, for tests: the calls that hpml_cuda.cuh makes, after NVIDIA's documentation. Of the
   algorithms it offers only the last is free of faults: the others fail, are not deterministic, want more workspace
   than there is, or compute in another way. A call that does not fit its descriptors, or takes another algorithm or
   another arithmetic than was offered, ends the program. Tensors and filter are all NCHW or all NHWC.
   cudnn_on_cpu_refuses: 1 descriptions, 2 algorithms, 4 fused calls, 8, 16, 32 forward, data, filter. */
#ifndef CUDNN_ON_CPU_H
#define CUDNN_ON_CPU_H

#define CUDNN_MAJOR 9
enum cudnnStatus_t { CUDNN_STATUS_SUCCESS = 0, CUDNN_STATUS_BAD_PARAM = 2000, CUDNN_STATUS_NOT_SUPPORTED = 3000,
                     CUDNN_STATUS_NOT_SUPPORTED_SHAPE = 3002, CUDNN_STATUS_ALLOC_FAILED = 4003 };
enum cudnnDataType_t { CUDNN_DATA_FLOAT = 0, CUDNN_DATA_HALF = 2, CUDNN_DATA_BFLOAT16 = 9 };
enum cudnnMathType_t { CUDNN_DEFAULT_MATH = 0, CUDNN_TENSOR_OP_MATH = 1, CUDNN_FMA_MATH = 3 };
enum cudnnTensorFormat_t { CUDNN_TENSOR_NCHW = 0, CUDNN_TENSOR_NHWC = 1 };
enum cudnnConvolutionMode_t { CUDNN_CONVOLUTION = 0, CUDNN_CROSS_CORRELATION = 1 };
enum cudnnActivationMode_t { CUDNN_ACTIVATION_RELU = 1, CUDNN_ACTIVATION_IDENTITY = 5 };
enum cudnnNanPropagation_t { CUDNN_NOT_PROPAGATE_NAN = 0, CUDNN_PROPAGATE_NAN = 1 };
enum cudnnDeterminism_t { CUDNN_NON_DETERMINISTIC = 0, CUDNN_DETERMINISTIC = 1 };
enum cudnnConvolutionFwdAlgo_t {
    CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM = 1, CUDNN_CONVOLUTION_FWD_ALGO_FFT = 4,
    CUDNN_CONVOLUTION_FWD_ALGO_FFT_TILING = 5, CUDNN_CONVOLUTION_FWD_ALGO_WINOGRAD = 6,
    CUDNN_CONVOLUTION_FWD_ALGO_WINOGRAD_NONFUSED = 7
};
enum cudnnConvolutionBwdDataAlgo_t {
    CUDNN_CONVOLUTION_BWD_DATA_ALGO_1 = 1, CUDNN_CONVOLUTION_BWD_DATA_ALGO_FFT = 2,
    CUDNN_CONVOLUTION_BWD_DATA_ALGO_FFT_TILING = 3, CUDNN_CONVOLUTION_BWD_DATA_ALGO_WINOGRAD = 4,
    CUDNN_CONVOLUTION_BWD_DATA_ALGO_WINOGRAD_NONFUSED = 5
};
enum cudnnConvolutionBwdFilterAlgo_t {
    CUDNN_CONVOLUTION_BWD_FILTER_ALGO_1 = 1, CUDNN_CONVOLUTION_BWD_FILTER_ALGO_FFT = 2,
    CUDNN_CONVOLUTION_BWD_FILTER_ALGO_WINOGRAD = 4, CUDNN_CONVOLUTION_BWD_FILTER_ALGO_WINOGRAD_NONFUSED = 5,
    CUDNN_CONVOLUTION_BWD_FILTER_ALGO_FFT_TILING = 6
};

struct cudnn_thing { /* any descriptor, or a handle */
    enum { HANDLE, TENSOR, FILTER, CONVOLUTION, ACTIVATION } kind;
    cudaStream_t    stream;
    cudnnDataType_t type;
    int             n, c, h, w; /* of a tensor; of a filter: out, in of a group, height, width */
    int             pad[2], stride[2], dilation[2], groups, math;
    bool            set, relu, nhwc; /* nhwc: order in memory of a tensor, (n, h, w, c), or of a filter */
    size_t  size() const { return type == CUDNN_DATA_FLOAT ? 4 : 2; }
    int64_t count() const { return (int64_t)n * c * h * w; }
    int64_t at(int64_t in, int64_t ic, int64_t ih, int64_t iw) const
    {
        return nhwc ? ((in * h + ih) * w + iw) * c + ic : ((in * c + ic) * h + ih) * w + iw;
    }
    bool    holds(const void *p) const /* cuDNN reads 16 bytes at a time */
    {
        return set && reinterpret_cast<uintptr_t>(p) % 16 == 0 && emu::memory_holds(p, (size_t)count() * size(), true);
    }
    float   get(const void *p, int64_t i) const
    {
        if (type == CUDNN_DATA_FLOAT) return static_cast<const float *>(p)[i];
        return type == CUDNN_DATA_HALF ? __half2float(static_cast<const __half *>(p)[i])
                                       : __bfloat162float(static_cast<const __nv_bfloat16 *>(p)[i]);
    }
    void put(void *p, int64_t i, float v) const
    {
        if (type == CUDNN_DATA_FLOAT) static_cast<float *>(p)[i] = v;
        else if (type == CUDNN_DATA_HALF) static_cast<__half *>(p)[i] = __float2half_rn(v);
        else static_cast<__nv_bfloat16 *>(p)[i] = __float2bfloat16_rn(v);
    }
};
typedef cudnn_thing *cudnnHandle_t, *cudnnTensorDescriptor_t, *cudnnFilterDescriptor_t, *cudnnConvolutionDescriptor_t,
    *cudnnActivationDescriptor_t;

/* live: things that are not destroyed; ran: calls: forward, data, filter, fused; questions for an algorithm; wants:
   bytes of workspace */
inline int       cudnn_on_cpu_refuses, cudnn_on_cpu_live;
inline long      cudnn_on_cpu_ran[5];
constexpr size_t cudnn_on_cpu_wants = 4096;

inline bool cudnn_refused(int what) { return (cudnn_on_cpu_refuses & what) != 0; }
inline const char *cudnnGetErrorString(cudnnStatus_t) { return "cudnn on a CPU"; }
inline void        cudnnGetLastErrorString(char *text, size_t) { text[0] = 0; }
#define CUDNN_THING(name, KIND)                                                                                     \
    inline cudnnStatus_t cudnnCreate##name(cudnn_thing **p)                                                         \
    {                                                                                                               \
        cudnn_on_cpu_live++;                                                                                        \
        *p = new cudnn_thing();                                                                                     \
        (*p)->kind = cudnn_thing::KIND;                                                                             \
        return CUDNN_STATUS_SUCCESS;                                                                                \
    }                                                                                                               \
    inline cudnnStatus_t cudnnDestroy##name(cudnn_thing *p)                                                         \
    {                                                                                                               \
        return cudnn_on_cpu_live--, delete p, CUDNN_STATUS_SUCCESS;                                                 \
    }
CUDNN_THING(, HANDLE)
CUDNN_THING(TensorDescriptor, TENSOR)
CUDNN_THING(FilterDescriptor, FILTER)
CUDNN_THING(ConvolutionDescriptor, CONVOLUTION)
CUDNN_THING(ActivationDescriptor, ACTIVATION)
#undef CUDNN_THING

inline cudnnStatus_t cudnnSetStream(cudnnHandle_t h, cudaStream_t s) { return h->stream = s, CUDNN_STATUS_SUCCESS; }
inline cudnnStatus_t cudnn_set4(cudnn_thing *t, int kind, cudnnTensorFormat_t order, cudnnDataType_t type, int n, int c,
                                int h, int w)
{
    if (t->kind != kind || n < 1 || c < 1 || h < 1 || w < 1) return CUDNN_STATUS_BAD_PARAM;
    t->type = type, t->n = n, t->c = c, t->h = h, t->w = w, t->nhwc = order == CUDNN_TENSOR_NHWC, t->set = true;
    return CUDNN_STATUS_SUCCESS;
}
inline cudnnStatus_t cudnnSetTensor4dDescriptor(cudnnTensorDescriptor_t t, cudnnTensorFormat_t order,
                                                cudnnDataType_t type, int n, int c, int h, int w)
{
    if (cudnn_refused(1)) return CUDNN_STATUS_NOT_SUPPORTED_SHAPE;
    return cudnn_set4(t, cudnn_thing::TENSOR, order, type, n, c, h, w);
}
inline cudnnStatus_t cudnnSetFilter4dDescriptor(cudnnFilterDescriptor_t t, cudnnDataType_t type,
                                                cudnnTensorFormat_t order, int k, int c, int h, int w)
{
    return cudnn_set4(t, cudnn_thing::FILTER, order, type, k, c, h, w);
}
inline cudnnStatus_t cudnnSetConvolution2dDescriptor(cudnnConvolutionDescriptor_t t, int ph, int pw,
                                                     int sh, int sw, int dh, int dw, cudnnConvolutionMode_t mode,
                                                     cudnnDataType_t compute)
{
    if (ph < 0 || pw < 0 || sh < 1 || sw < 1 || dh < 1 || dw < 1 || mode != CUDNN_CROSS_CORRELATION ||
        compute != CUDNN_DATA_FLOAT)
        return CUDNN_STATUS_BAD_PARAM;
    t->pad[0] = ph, t->pad[1] = pw, t->stride[0] = sh, t->stride[1] = sw, t->dilation[0] = dh, t->dilation[1] = dw;
    t->groups = 1, t->set = true;
    return CUDNN_STATUS_SUCCESS;
}
inline cudnnStatus_t cudnnSetConvolutionGroupCount(cudnnConvolutionDescriptor_t t, int groups)
{
    return t->groups = groups, CUDNN_STATUS_SUCCESS;
}
inline cudnnStatus_t cudnnSetConvolutionMathType(cudnnConvolutionDescriptor_t t, cudnnMathType_t math)
{
    return t->math = math, CUDNN_STATUS_SUCCESS;
}
inline cudnnStatus_t cudnnSetActivationDescriptor(cudnnActivationDescriptor_t t, cudnnActivationMode_t mode,
                                                  cudnnNanPropagation_t, double)
{
    return t->relu = mode == CUDNN_ACTIVATION_RELU, t->set = true, CUDNN_STATUS_SUCCESS;
}

/* y is what x, w and the convolution make. */
inline bool cudnn_fits(const cudnn_thing *x, const cudnn_thing *w, const cudnn_thing *v, const cudnn_thing *y)
{
    auto out = [v](int i, int size, int kernel) {
        return (size + 2 * v->pad[i] - v->dilation[i] * (kernel - 1) - 1) / v->stride[i] + 1;
    };
    return x->kind == cudnn_thing::TENSOR && y->kind == cudnn_thing::TENSOR && w->kind == cudnn_thing::FILTER &&
           v->kind == cudnn_thing::CONVOLUTION && x->set && w->set && v->set && y->set && x->type == y->type &&
           x->type == w->type && x->nhwc == y->nhwc && x->nhwc == w->nhwc && x->n == y->n &&
           x->c == w->c * v->groups && y->c == w->n && w->n % v->groups == 0 &&
           y->h == out(0, x->h, w->h) && y->w == out(1, x->w, w->w);
}

/* Bytes of workspace of tensor-core algorithms for NCHW, because the library converts x and y to NHWC. */
inline size_t cudnn_wants(const cudnn_thing &x, const cudnn_thing &y, int math)
{
    bool turns = library_is(LIBRARY_NCHW) && !x.nhwc && math != CUDNN_FMA_MATH;
    return turns ? ((size_t)65 << 20) + (size_t)(x.count() + y.count()) * x.size() : cudnn_on_cpu_wants;
}

#define CUDNN_OFFERS(Kind, KIND, Getter, first, second, third, x, w, v, y)                                          \
    struct cudnnConvolution##Kind##AlgoPerf_t {                                                                     \
        cudnnConvolution##Kind##Algo_t algo;                                                                        \
        cudnnStatus_t                  status;                                                                      \
        float                          time;                                                                        \
        size_t                         memory;                                                                      \
        cudnnDeterminism_t             determinism;                                                                 \
        cudnnMathType_t                mathType;                                                                    \
    };                                                                                                              \
    inline cudnnStatus_t Getter(cudnnHandle_t, cudnn_thing *first, cudnn_thing *second,                             \
                                cudnnConvolutionDescriptor_t v, cudnn_thing *third, int asked, int *count,          \
                                cudnnConvolution##Kind##AlgoPerf_t *found)                                          \
    {                                                                                                               \
        typedef cudnnConvolution##Kind##Algo_t algo;                                                                \
        cudnn_on_cpu_ran[4]++, *count = 0;                                                                          \
        if (cudnn_refused(2) || library_is(LIBRARY_REFUSE)) return CUDNN_STATUS_NOT_SUPPORTED_SHAPE;                \
        if (!cudnn_fits(x, w, v, y) || asked < 6) return CUDNN_STATUS_BAD_PARAM;                                    \
        if (v->math == CUDNN_DEFAULT_MATH) return CUDNN_STATUS_BAD_PARAM; /* of a result, not of a query */         \
        cudnnMathType_t math = v->math == CUDNN_FMA_MATH ? CUDNN_FMA_MATH : CUDNN_DEFAULT_MATH;                     \
        cudnnMathType_t other = math == CUDNN_FMA_MATH ? CUDNN_TENSOR_OP_MATH : math;                               \
        const algo      good = (algo)1, winograd = CUDNN_CONVOLUTION_##KIND##_ALGO_WINOGRAD_NONFUSED;               \
        size_t          space = cudnn_wants(*x, *y, v->math);                                                       \
        found[0] = { (algo)2, CUDNN_STATUS_NOT_SUPPORTED, -1, 0, CUDNN_DETERMINISTIC, math };                       \
        found[1] = { (algo)3, CUDNN_STATUS_SUCCESS, -1, 0, CUDNN_NON_DETERMINISTIC, math };                         \
        found[2] = { good, CUDNN_STATUS_SUCCESS, -1, (size_t)1 << 40, CUDNN_DETERMINISTIC, math };                  \
        found[3] = { other == math ? good : (algo)9, CUDNN_STATUS_SUCCESS, -1, space, CUDNN_DETERMINISTIC, other }; \
        found[4] = { other == math ? good : winograd, CUDNN_STATUS_SUCCESS, -1, 0, CUDNN_DETERMINISTIC, math };     \
        found[5] = { good, CUDNN_STATUS_SUCCESS, -1, space, CUDNN_DETERMINISTIC, math };                            \
        if (other == math) found[4].memory = space;                                                                 \
        return *count = 6, CUDNN_STATUS_SUCCESS;                                                                    \
    }
CUDNN_OFFERS(Fwd, FWD, cudnnGetConvolutionForwardAlgorithm_v7, x, w, y, x, w, v, y)
CUDNN_OFFERS(BwdData, BWD_DATA, cudnnGetConvolutionBackwardDataAlgorithm_v7, w, y, x, x, w, v, y)
CUDNN_OFFERS(BwdFilter, BWD_FILTER, cudnnGetConvolutionBackwardFilterAlgorithm_v7, x, y, w, x, w, v, y)
#undef CUDNN_OFFERS

/* One of three is made of the other two: 0 y, 1 x, 2 w. */
inline cudnnStatus_t cudnn_run(int pass, cudnnHandle_t h, cudnn_thing *px, void *x, cudnn_thing *pw, void *w,
                               cudnn_thing *pv, cudnn_thing *py, void *y, int algo, const void *space, size_t bytes,
                               float alpha, float beta, const void *bias, bool relu)
{
    if (cudnn_refused(8 << pass)) return CUDNN_STATUS_NOT_SUPPORTED_SHAPE;
    emu::call   call;
    cudnn_thing X = *px, W = *pw, V = *pv, Y = *py;
    if (h->kind != cudnn_thing::HANDLE || !h->stream || algo != 1 || V.math == CUDNN_TENSOR_OP_MATH ||
        !cudnn_fits(px, pw, pv, py) || !X.holds(x) || !W.holds(w) || !Y.holds(y) || bytes < cudnn_wants(X, Y, V.math) ||
        !emu::memory_holds(space, bytes, true) ||
        (bias && !emu::memory_holds(bias, (size_t)Y.c * Y.size(), true)))
        fprintf(stderr, "cudnn: wrong arguments, pass %d\n", pass), abort();
    cudnn_on_cpu_ran[bias ? 3 : pass]++;
    const bool tf32 = V.math != CUDNN_FMA_MATH && X.type == CUDNN_DATA_FLOAT;
    emu::push(emu::stream_of(h->stream), [=] {
        const cudnn_thing &to = pass == 0 ? Y : pass == 1 ? X : W;
        void              *out = pass == 0 ? y : pass == 1 ? x : w;
        std::vector<float> sum((size_t)to.count());
        for (int64_t i = 0; i < Y.count() * W.c * W.h * W.w; i++) {
            int64_t tap = i % (W.c * W.h * W.w), q = i / (W.c * W.h * W.w), ow = q % Y.w, oh = q / Y.w % Y.h,
                    c = q / Y.w / Y.h % Y.c, n = q / Y.w / Y.h / Y.c;
            int64_t ih = oh * V.stride[0] - V.pad[0] + tap / W.w % W.h * V.dilation[0];
            int64_t iw = ow * V.stride[1] - V.pad[1] + tap % W.w * V.dilation[1],
                    ic = c / (Y.c / V.groups) * W.c + tap / W.w / W.h;
            if (ih < 0 || ih >= X.h || iw < 0 || iw >= X.w) continue;
            int64_t at = X.at(n, ic, ih, iw), k = W.at(c, tap / W.w / W.h, tap / W.w % W.h, tap % W.w);
            int64_t o = Y.at(n, c, oh, ow);
            auto get = [tf32](const cudnn_thing &t, const void *p, int64_t e) {
                return library_operand(t.get(p, e), tf32);
            };
            if (pass == 0) sum[(size_t)o] += get(X, x, at) * get(W, w, k);
            else if (pass == 1) sum[(size_t)at] += get(Y, y, o) * get(W, w, k);
            else sum[(size_t)k] += get(Y, y, o) * get(X, x, at);
        }
        for (int64_t i = 0; i < to.count(); i++) {
            float v = alpha * sum[(size_t)i] + (beta != 0 ? beta * to.get(out, i) : 0);
            if (bias) v += Y.get(bias, (Y.nhwc ? i : i / Y.w / Y.h) % Y.c);
            to.put(out, i, relu ? library_relu(v) : v);
        }
    });
    return CUDNN_STATUS_SUCCESS;
}

inline cudnnStatus_t cudnnConvolutionForward(cudnnHandle_t h, const void *alpha, cudnnTensorDescriptor_t dx,
                                             const void *x, cudnnFilterDescriptor_t dw, const void *w,
                                             cudnnConvolutionDescriptor_t v, cudnnConvolutionFwdAlgo_t algo,
                                             void *space, size_t bytes, const void *beta,
                                             cudnnTensorDescriptor_t dy, void *y)
{
    return cudnn_run(0, h, dx, const_cast<void *>(x), dw, const_cast<void *>(w), v, dy, y, algo, space, bytes,
                     *static_cast<const float *>(alpha), *static_cast<const float *>(beta), nullptr, false);
}
inline cudnnStatus_t cudnnConvolutionBackwardData(cudnnHandle_t h, const void *alpha, cudnnFilterDescriptor_t dw,
                                                  const void *w, cudnnTensorDescriptor_t dy, const void *y,
                                                  cudnnConvolutionDescriptor_t v, cudnnConvolutionBwdDataAlgo_t algo,
                                                  void *space, size_t bytes, const void *beta,
                                                  cudnnTensorDescriptor_t dx, void *x)
{
    return cudnn_run(1, h, dx, x, dw, const_cast<void *>(w), v, dy, const_cast<void *>(y), algo, space, bytes,
                     *static_cast<const float *>(alpha), *static_cast<const float *>(beta), nullptr, false);
}
inline cudnnStatus_t cudnnConvolutionBackwardFilter(cudnnHandle_t h, const void *alpha, cudnnTensorDescriptor_t dx,
                                                    const void *x, cudnnTensorDescriptor_t dy, const void *y,
                                                    cudnnConvolutionDescriptor_t v,
                                                    cudnnConvolutionBwdFilterAlgo_t algo, void *space, size_t bytes,
                                                    const void *beta, cudnnFilterDescriptor_t dw, void *w)
{
    return cudnn_run(2, h, dx, const_cast<void *>(x), dw, w, v, dy, const_cast<void *>(y), algo, space, bytes,
                     *static_cast<const float *>(alpha), *static_cast<const float *>(beta), nullptr, false);
}
inline cudnnStatus_t cudnnConvolutionBiasActivationForward(
    cudnnHandle_t h, const void *alpha, cudnnTensorDescriptor_t dx, const void *x, cudnnFilterDescriptor_t dw,
    const void *w, cudnnConvolutionDescriptor_t v, cudnnConvolutionFwdAlgo_t algo, void *space, size_t bytes,
    const void *beta, cudnnTensorDescriptor_t dz, const void *, cudnnTensorDescriptor_t db, const void *bias,
    cudnnActivationDescriptor_t act, cudnnTensorDescriptor_t dy, void *y)
{
    if (cudnn_refused(4)) return CUDNN_STATUS_NOT_SUPPORTED_SHAPE;
    if (dz != dy || *static_cast<const float *>(beta) != 0 || !act->set || !bias || db->n != 1 || db->c != dy->c ||
        db->h != 1 || db->w != 1 || db->type != dy->type)
        fprintf(stderr, "cudnn: wrong arguments, fused\n"), abort();
    return cudnn_run(0, h, dx, const_cast<void *>(x), dw, const_cast<void *>(w), v, dy, y, algo, space, bytes,
                     *static_cast<const float *>(alpha), 0, bias, act->relu);
}

#endif
