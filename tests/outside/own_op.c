/* An op of one's own, by public names alone: Mish (Misra 2019), y = x tanh(softplus(x)), with its derivative. It is
   checked by finite differences, trains as the same function recorded from built-in ops does, and runs on two ranks. */
#include "../../hpml_comm.h"
#include "../test.h"

static hpml_status mish_forward(const hpml_run *run, hpml_node *n)
{
    const float *x = n->src[0]->data;
    (void)run;
    for (int64_t i = 0; i < hpml_tensor_count(n->out); i++) n->out->data[i] = x[i] * tanhf(log1pf(expf(x[i])));
    return HPML_OK;
}
static hpml_status mish_backward(const hpml_run *run, hpml_node *n)
{
    const float *x  = n->src[0]->data;
    float       *dy = n->out->grad;
    for (int64_t i = 0; i < hpml_tensor_count(n->out); i++) {
        float t = tanhf(log1pf(expf(x[i])));
        dy[i] *= t + x[i] * (1 - t * t) / (1 + expf(-x[i]));
    }
    hpml_node_give(run, n, 0, dy);
    return HPML_OK;
}
static const hpml_custom op = { .name = "mish", .forward = mish_forward, .backward = mish_backward,
                                .keeps = HPML_KEEP_SRC(0) };
static hpml_tensor *mish(hpml_tensor *x) { return hpml_custom_op(&x, 1, &op); }
static hpml_tensor *recorded(hpml_tensor *x) /* tanh(log u) = (u^2 - 1) / (u^2 + 1), u = 1 + e^x */
{
    hpml_tensor *u = hpml_activation(hpml_scale(hpml_activation(x, HPML_ACT_EXP, 0), 1, 1), HPML_ACT_SQUARE, 0);
    return hpml_mul(x, hpml_div(hpml_scale(u, 1, -1), hpml_scale(u, 1, 1)));
}

enum { B = 32, IN = 6 };
typedef struct job { hpml_tensor *(*act)(hpml_tensor *); double check; float loss; } job;
static hpml_status train(hpml_comm *c, void *user) /* |x0 + x1|, from samples */
{
    job           one = *(job *)user;
    float         in[B * IN], want[B];
    hpml_step_info info = { 0 };
    hpml_ctx     *ctx = hpml_comm_ctx(c);
    hpml_tensor  *x = hpml_input_2d(ctx, B, IN), *y = hpml_linear(one.act(hpml_linear(x, 16, NULL)), 1, NULL);
    hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = x, .output = y, .loss = HPML_LOSS_MSE,
                                                                     .optimizer = HPML_OPT_ADAM, .lr = 0.01f });
    hpml_rng      rng = { .seed = 7, .stream = (uint64_t)hpml_comm_rank(c) };
    hpml_distribute(t, c, NULL);
    for (int s = 0; s < 300; s++) {
        hpml_rng_fill_normal(&rng, in, B * IN);
        for (int i = 0; i < B; i++) want[i] = fabsf(in[i * IN] + in[i * IN + 1]);
        hpml_trainer_step(t, in, want, B, &info);
    }
    one.check = hpml_check_grad(hpml_trainer_graph(t), 0, 50);
    one.loss  = info.loss;
    if (hpml_comm_rank(c) == 0) *(job *)user = one;
    return hpml_ctx_status(ctx);
}
TEST(it_learns_as_the_recorded_function_does_on_one_rank_and_on_two)
{
    for (int ranks = 1; ranks <= 2; ranks++) {
        hpml_launch_desc d = { .ranks = ranks, .ctx = { .threads = 1, .seed = 4 } };
        job own = { .act = mish }, other = { .act = recorded };
        ENSURE(hpml_launch(&d, train, &own, NULL, 0) == HPML_OK && hpml_launch(&d, train, &other, NULL, 0) == HPML_OK);
        ENSURE(own.check >= 0 && own.check < 5e-3 && own.loss < 0.05);
        ENSURE_NEAR(own.loss, other.loss, 1e-3 * other.loss + 1e-4);
    }
}
