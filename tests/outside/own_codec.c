/* A codec of your own, by public names alone: TernGrad (Wen et al. 2017). An element g of a row whose largest |g| is s
   travels as 0, s or -s, by chance: not as 0 with probability |g| / s, so that the mean of the draws is g. */
#define HPML_IMPLEMENTATION
#include "../../hpml_comm.h"
#include "../test.h"
static size_t tern_row_size(const hpml_codec_desc *desc, int64_t cols)
{
    return (void)desc, 4 + (size_t)(cols + 15) / 16 * 4; /* s, then 2 bits for each element: 0, 1: s, 2: -s */
}
static hpml_status tern_encode(const hpml_packing *p, void *packed, float *residual, const float *grad, int64_t rows,
                               const hpml_encode_info *info)
{
    hpml_status status = residual ? HPML_ERR_STATE : HPML_OK; /* has_residual is false */
    memset(packed, 0, (size_t)rows * p->row_size);
    for (int64_t r = 0; r < rows; r++, grad += p->cols) {
        unsigned char *q = (unsigned char *)packed + (size_t)r * p->row_size;
        hpml_rng       rng = { .seed = info->seed, .stream = (uint64_t)(info->step << 32 | (info->row + r)) };
        float s = 0, bad = 0;
        for (int64_t i = 0; i < p->cols; i++) s = fmaxf(s, fabsf(grad[i])), bad += grad[i] - grad[i];
        if (bad != 0) status = HPML_ERR_NONFINITE; /* NaN: the row stays zero */
        else memcpy(q, &s, sizeof s);
        for (int64_t i = 0; i < p->cols && bad == 0; i++)
            if (hpml_rng_uniform(&rng) * s < fabsf(grad[i])) q[4 + i / 4] |= (grad[i] > 0 ? 1 : 2) << (2 * (i % 4));
    }
    return status;
}
static void tern_decode(const hpml_packing *p, float *out, const void *packed, int64_t rows, bool add)
{
    const unsigned char *q = (const unsigned char *)packed;
    for (int64_t r = 0; r < rows; r++, q += p->row_size, out += p->cols) {
        const float s = *(const float *)(const void *)q, value[3] = { 0, s, -s }; /* rows are aligned to 4 bytes */
        for (int64_t i = 0; i < p->cols; i++) out[i] = (add ? out[i] : 0) + value[q[4 + i / 4] >> (2 * (i % 4)) & 3];
    }
}
static const hpml_codec tern = { "terngrad", false, false, true, false, tern_row_size, tern_encode, tern_decode };
TEST(the_mean_over_many_steps_is_the_gradient)
{
    enum { N = 50, STEPS = 20000 };
    float g[N], sum[N] = { 0 }, packed[1 + (N + 15) / 16];
    hpml_packing p;
    ENSURE(hpml_packing_init(&p, &(hpml_codec_desc){ .custom = &tern, .compress_all = true }, 1, N) == HPML_OK);
    for (int i = 0; i < N; i++) g[i] = (float)(i - 20) / 20;
    for (int64_t step = 0; step < STEPS; step++) {
        hpml_packing_encode(&p, packed, NULL, g, 1, &(hpml_encode_info){ .step = step, .seed = 1 });
        hpml_packing_decode_add(&p, sum, packed, 1);
    }
    for (int i = 0; i < N; i++) ENSURE_NEAR(sum[i] / STEPS, g[i], 0.03); /* 5 standard deviations */
}
typedef struct job { uint64_t seed, hash; float first, last; } job;
static hpml_status train(hpml_comm *c, void *user) /* differences of inputs, from samples */
{
    enum { B = 16, IN = 40, OUT = 10 };
    job           one = *(job *)user;
    float         in[B * IN], want[B * OUT];
    hpml_ctx     *ctx = hpml_comm_ctx(c);
    hpml_tensor  *x = hpml_input_2d(ctx, B, IN), *y = hpml_linear(x, OUT, NULL);
    hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = x, .output = y, .loss = HPML_LOSS_MSE,
                                                                     .lr = 0.1f });
    hpml_rng      rng = { .seed = 7, .stream = (uint64_t)hpml_comm_rank(c) };
    hpml_distribute(t, c, &(hpml_plan){ .codec = { .custom = &tern, .seed = one.seed } });
    for (int s = 0; s < 300; s++) {
        hpml_step_info info = { 0 };
        hpml_rng_fill_normal(&rng, in, B * IN);
        for (int i = 0; i < B * OUT; i++) want[i] = in[i / OUT * IN + i % OUT] - in[i / OUT * IN + 20];
        hpml_trainer_step(t, in, want, B, &info);
        *(s == 0 ? &one.first : &one.last) = info.loss;
    }
    one.hash = hpml_param_hash(ctx);
    if (hpml_comm_rank(c) == 0) *(job *)user = one;
    return hpml_ctx_status(ctx);
}
TEST(two_threads_learn_and_the_seed_decides_the_bits)
{
    job              a = { .seed = 1 }, again = a, other = { .seed = 2 }, *all[] = { &a, &again, &other };
    hpml_launch_desc two = { .ranks = 2 };
    for (int i = 0; i < 3; i++) ENSURE(hpml_launch(&two, train, all[i], NULL, 0) == HPML_OK);
    ENSURE(a.last < a.first / 20 && other.last < other.first / 20);
    ENSURE(a.hash == again.hash && a.hash != other.hash);
}
