/* A small training under a plan: batchnorm, dropout, momentum, the last batch of a pass is short. */
#include "toy_points.h"

typedef struct plan_trial {
    hpml_plan plan;
    int       steps;    /* 0: 3 */
    bool      odd_rank; /* rank 1 has another plan */
    bool      same;     /* all ranks have the same parameters in the end */
    uint64_t  hash;     /* of the parameters */
    int64_t   made;     /* steps that the trainer has made */
    double    seconds;  /* of the ranks' clocks */
    char      text[512];
} plan_trial;

static hpml_status plan_train(hpml_comm *c, void *user)
{
    plan_trial   *j     = (plan_trial *)user;
    hpml_ctx     *ctx   = hpml_comm_ctx(c);
    if (j->plan.shard > 0) hpml_comm_set_plan(c, &j->plan);
    bool          late  = j->plan.shard > 0 || j->plan.pipe > 1 || j->plan.recompute || j->plan.memory > 0 ||
                          j->plan.host_optimizer;
    hpml_ctx_defer(ctx, late);
    hpml_tensor  *x     = hpml_input_2d(ctx, 6, INPUTS);
    hpml_tensor  *h     = hpml_dropout(hpml_relu(hpml_batchnorm(hpml_linear(x, 16, NULL), NULL)), 0.1f);
    float         momentum = j->plan.codec.momentum > 0 ? 0 : 0.9f;
    hpml_trainer *t     = hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = x, .output = hpml_linear(h, CLASSES, NULL), .lr = 0.05f, .momentum = momentum });
    hpml_dataset *data  = points(ctx, 44, 0, 0, 0);
    hpml_plan     plan  = j->plan;
    if (j->odd_rank && hpml_comm_rank(c) == 1) plan.no_overlap = true;
    hpml_distributed *d = hpml_distribute(t, c, &plan);
    for (int step = 0; step < (j->steps ? j->steps : 3); step++) {
        hpml_trainer_fit(t, data, &(hpml_fit_desc){ .epochs = 100, .max_steps = 1 });
        if (strcmp(hpml_comm_transport(c), "clock") == 0) hpml_comm_compute(c, 0.01);
    }
    hpml_distribute_finish(d);
    bool same = same_params(c);
    if (hpml_comm_rank(c) != 0) return hpml_ctx_status(ctx);
    j->same    = same;
    j->hash    = hpml_param_hash(ctx);
    j->made    = hpml_trainer_step_count(t);
    j->seconds = hpml_comm_now(c);
    return hpml_ctx_status(ctx);
}
