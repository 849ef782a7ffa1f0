/* signSGD with majority vote (Bernstein et al. 2019), a codec of your own by public names alone. Each rank sends the
   signs of its gradient, 1 bit each; the owner of a row adds them up and packs the sum, which again keeps the sign: the
   vote of the majority. Adversaries, ranks that maximize the loss, do little harm while they are fewer than half. */
#define HPML_IMPLEMENTATION
#include "../../hpml_comm.h"
#include "../test.h"
#include "../mlp.h"
static size_t sign_row_size(const hpml_codec_desc *desc, int64_t cols)
{
    return (void)desc, (size_t)(cols + 31) / 32 * 4;
}
static hpml_status sign_encode(const hpml_packing *p, void *packed, float *residual, const float *grad, int64_t rows,
                               const hpml_encode_info *info)
{
    hpml_status status = residual ? HPML_ERR_STATE : HPML_OK; /* has_residual is false */
    memset(packed, 0, (size_t)rows * p->row_size);
    for (int64_t r = 0; r < rows; r++, grad += p->cols) {
        unsigned char *bits = (unsigned char *)packed + (size_t)r * p->row_size;
        hpml_rng       rng = { .seed = info->seed, .stream = (uint64_t)(info->step << 32 | (info->row + r)) };
        for (int64_t i = 0; i < p->cols; i++) {
            if (grad[i] - grad[i] != 0) status = HPML_ERR_NONFINITE; /* NaN, infinite: no step is made */
            bool is_up = grad[i] != 0 ? grad[i] > 0 : hpml_rng_uniform(&rng) < 0.5f; /* 0 has no sign: by chance */
            bits[i / 8] |= (unsigned char)(is_up << (i % 8));
        }
    }
    return status;
}
static void sign_decode(const hpml_packing *p, float *out, const void *packed, int64_t rows, bool add)
{
    const unsigned char *bits = (const unsigned char *)packed;
    for (int64_t r = 0; r < rows; r++, bits += p->row_size, out += p->cols)
        for (int64_t i = 0; i < p->cols; i++) {
            float sign = bits[i / 8] >> (i % 8) & 1 ? 1.0f : -1.0f;
            out[i] = add ? out[i] + sign : sign;
        }
}
static const hpml_codec signs = { "sign", false, false, false, false, sign_row_size, sign_encode, sign_decode };

enum { RANKS = 5, BATCH = 128 / RANKS };
typedef struct job { int adversaries; double accuracy, bytes, plain; } job;
static hpml_status train(hpml_comm *c, void *user)
{
    job              *j = (job *)user;
    hpml_ctx         *ctx = hpml_comm_ctx(c);
    const int64_t     shape[] = { BATCH };
    hpml_tensor      *x = hpml_input_2d(ctx, BATCH, 784), *y = mlp(x);
    hpml_trainer_desc d = { .input = x, .output = y, .lr = 3e-4f, .momentum = 0.9f };
    if (hpml_comm_rank(c) < j->adversaries) { /* minimizes the negative loss */
        d.target      = hpml_input(ctx, HPML_DTYPE_I32, 1, shape);
        d.loss_tensor = hpml_scale(hpml_cross_entropy(y, d.target, NULL), -1, 0);
    }
    hpml_trainer     *t = hpml_trainer_create(ctx, &d);
    hpml_distributed *all = hpml_distribute(t, c, &(hpml_plan){
        .sum = true, .codec = { .custom = &signs, .compress_all = true } });
    hpml_distribute_report r;
    hpml_metrics           m = { 0 };
    hpml_trainer_fit(t, digits(ctx, 0, to_learn), &(hpml_fit_desc){ .epochs = 6 });
    hpml_trainer_evaluate(t, digits(ctx, to_learn, TESTED), &m);
    hpml_distribute_get(all, &r, false);
    if (hpml_comm_rank(c) == RANKS - 1) *j = (job){ j->adversaries, m.accuracy, r.bytes, r.plain_bytes };
    return hpml_ctx_status(ctx);
}
TEST(a_majority_of_honest_ranks_learns)
{
    static const double least[] = { 0.85, 0.85, 0.7, 0 }, most[] = { 1, 1, 1, 0.3 };
    hpml_launch_desc    five = { .ranks = RANKS, .ctx = { .seed = 1, .threads = 1 } };
    get_digits(4096);
    for (int k = 0; k <= 3; k++) {
        job j = { .adversaries = k };
        ENSURE(hpml_launch(&five, train, &j, NULL, 0) == HPML_OK);
        printf("    %d of 5 are adversaries: %.2f %%, %.0f bytes a step\n", k, 100 * j.accuracy, j.bytes);
        ENSURE(j.accuracy >= least[k] && j.accuracy <= most[k]);
        ENSURE(j.bytes < j.plain / 27);
    }
}
