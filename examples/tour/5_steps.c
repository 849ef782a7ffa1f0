/* A tour of the trainer's inside, for strategies and loops of your own: settings, passes, steps, arrays. Difficulty 3
   of 4.
   cc -O2 examples/tour/5_steps.c -o steps -lm -lpthread && mkdir -p build && ./steps
   prints the conditions that hold, and WRONG before one that does not; exits with 1 then. */
#define HPML_IMPLEMENTATION
#include "../../hpml.h"
#include "tour.h"
#include <math.h>
#include <string.h>

static const float   cases[8]   = { 0, 0, 0, 1, 1, 0, 1, 1 };
static const int32_t answers[4] = { 0, 1, 1, 0 };

/* Records and creates the trainer of the exclusive or. */
static hpml_trainer *create(hpml_ctx *ctx, hpml_opt optimizer)
{
    hpml_tensor      *x = hpml_input_2d(ctx, 4, 2);
    hpml_trainer_desc d = { .input = x, .output = hpml_linear(hpml_tanh(hpml_linear(x, 8, NULL)), 2, NULL),
                            .optimizer = optimizer, .lr = 0.1f };
    return hpml_trainer_create(ctx, &d);
}

static void settings(hpml_ctx *ctx)
{
    hpml_trainer_desc asked = { .optimizer = HPML_OPT_ADAM }, all;
    hpml_schedule     half  = { .kind = HPML_SCHEDULE_STEP, .period = 10, .gamma = 0.5f };
    hpml_trainer_desc_resolve(&asked, &all);
    SHOW(all.lr == 0.001f && all.beta1 == 0.9f && all.beta2 == 0.999f);
    SHOW(hpml_schedule_lr(&half, 0.1f, 25) == 0.025f);
    SHOW(hpml_lr_scale(HPML_LR_LINEAR, 0.1f, 4) == 0.4f);
    SHOW(strcmp(hpml_optimizer_find("adam")->name, "adam") == 0 && hpml_optimizer_at(0) != NULL);
    hpml_trainer *t = create(ctx, HPML_OPT_SGD);
    SHOW(hpml_trainer_settings(t)->lr == 0.1f && hpml_trainer_lr(t) == 0.1f);
}

/* A step by hand has the bits of hpml_trainer_step. */
static void by_hand(hpml_ctx *ctx, hpml_ctx *other)
{
    hpml_trainer *a = create(ctx, HPML_OPT_ADAM), *b = create(other, HPML_OPT_ADAM);
    float         loss = 0, part = 0;
    int64_t       hits[2];
    hpml_trainer_step(a, cases, answers, 4, NULL);
    hpml_trainer_step(b, cases, answers, 4, NULL);
    SHOW(hpml_param_hash(ctx) == hpml_param_hash(other));
    hpml_trainer_forward_backward(b, 0, 4, 1, false, &loss); /* the batch that is in the inputs */
    hpml_trainer_apply(b, 0, hpml_param_count(other));
    hpml_trainer_set_step(b, 2);
    hpml_trainer_step(a, cases, answers, 4, NULL);
    SHOW(hpml_trainer_step_count(b) == 2 && hpml_param_hash(ctx) == hpml_param_hash(other));
    hpml_trainer_forward(b, 0, 0, 2, &part);        /* samples 0 and 1 of the batch, then 2 and 3 */
    hpml_trainer_backward(b, 0, 0.5f, false, false); /* half of the mean */
    hpml_trainer_forward(b, 0, 2, 2, &loss);
    hpml_trainer_backward(b, 0, 0.5f, true, true);
    SHOW(isfinite(part) && isfinite(loss));
    const hpml_batch batch = { .x = cases, .y = answers, .samples = 4, .global_samples = 4 };
    SHOW(hpml_trainer_step_batch(b, &batch, NULL) == HPML_OK); /* a loader's batch, with its further inputs */
    hpml_trainer_hits(b, hits); /* right answers, and how many counted, as a rank reports them to others */
    hpml_trainer_set_hits(b, hits);
    int64_t floats = 0;
    SHOW(hpml_trainer_array(b, HPML_ARRAY_VALUES, &floats) != NULL && floats % HPML_GRADIENT_ALIGN == 0);
    hpml_trainer_apply_range(b, 0, floats, 1); /* all parameters as one array */
    SHOW(hpml_ctx_status(other) == HPML_OK && hpml_trainer_output(b, &floats) == NULL); /* only inside predict */
}

static hpml_status before(void *user, hpml_trainer *t, const hpml_moment *at, int64_t samples, float *loss)
{
    *(int64_t *)user += at->step == 0 ? samples : 0;
    return hpml_trainer_run_inner(t, samples, loss); /* what this hook replaces */
}
static const hpml_node *next_op; /* the op behind the first one that reads a parameter */

/* The hook `need`: an op is about to read a parameter; hpml_graph_ahead names the ops that follow. */
static hpml_status need(void *user, hpml_trainer *t, const hpml_moment *at)
{
    int place = 0;
    (void)user;
    if (!next_op && at->pass == HPML_PASS_FORWARD) next_op = hpml_graph_ahead(hpml_trainer_graph(t), &place);
    return HPML_OK;
}

static void hooks(hpml_ctx *ctx)
{
    static float  mine[4] = { 1, 2, 3, 4 };
    int64_t       seen = 0, floats = 0;
    int           count = 0;
    hpml_hooks    h = { .user = &seen, .run = before, .need = need };
    hpml_trainer *t = create(ctx, HPML_OPT_SGD);
    hpml_trainer_attach(t, &h);
    hpml_trainer_step(t, cases, answers, 4, NULL);
    SHOW(seen == 4 && hpml_trainer_hooks(t, &count) != NULL && count == 1);
    SHOW(next_op != NULL);
    hpml_trainer_detach(t, &seen);
    SHOW(hpml_trainer_add_state(t, "mine", mine, 4) == HPML_OK); /* checkpoints then save it */
    hpml_tensor *w     = hpml_param_at(ctx, 0);
    float       *whole = (float *)hpml_ctx_alloc(ctx, 4 * (size_t)hpml_param_whole(w, NULL), NULL);
    SHOW(hpml_trainer_collect(t, 0, HPML_ARRAY_VALUES, whole) == HPML_OK && whole[0] == w->data[0]);
    hpml_param_copy(w, w->data, 0, hpml_tensor_count(w), whole, false); /* the part of this rank, from the whole */
    SHOW(hpml_trainer_place(t, 0) == 0 && hpml_trainer_part(t, 0, HPML_ARRAY_VALUES) != NULL);
    SHOW(hpml_trainer_array(t, HPML_ARRAY_GRADIENTS, &floats) != NULL);
}

/* Memory that is taken late, so that this rank keeps only a part of it. */
static void shards(hpml_ctx *ctx)
{
    float *room = NULL;
    hpml_ctx_defer(ctx, true);
    hpml_trainer *t = create(ctx, HPML_OPT_ADAM);
    SHOW(hpml_trainer_keep(t, 0, 1, 0, 8) == HPML_OK); /* the optimizer's states of 8 of the 16 numbers */
    SHOW(hpml_trainer_reserve(t, HPML_ARRAY_GRADIENTS, 100, &room) == HPML_OK);
    SHOW(hpml_trainer_alloc(t) == HPML_OK && room != NULL);
    hpml_ctx_defer(ctx, false);
}

/* The backward pass in two halves: first the gradients that go on to earlier layers, then those of the weights. */
static void halves(hpml_ctx *ctx)
{
    float loss = 0;
    hpml_ctx_defer(ctx, true);
    hpml_trainer *t = create(ctx, HPML_OPT_ADAM);
    hpml_ctx_defer(ctx, false);
    SHOW(hpml_trainer_host_optimizer(t) == HPML_OK); /* states in host memory; without a device nothing changes */
    SHOW(hpml_graph_halves(hpml_trainer_graph(t)) == HPML_OK && hpml_trainer_alloc(t) == HPML_OK);
    hpml_trainer_step(t, cases, answers, 4, NULL);
    hpml_trainer_forward(t, 0, 0, 4, &loss);
    hpml_trainer_backward_half(t, 0, HPML_HALF_INPUTS, 1, false, true);
    SHOW(hpml_trainer_backward_half(t, 0, HPML_HALF_WEIGHTS, 1, false, true) == HPML_OK);
}

/* What fit leaves behind. */
static void epochs(hpml_ctx *ctx)
{
    const int64_t shape[1] = { 2 };
    char          line[120];
    float         scores[8];
    hpml_epoch    rows[8];
    hpml_trainer *t = create(ctx, HPML_OPT_ADAM);
    hpml_dataset *d = hpml_dataset_create(ctx, 4, HPML_DTYPE_F32, 1, shape, cases, HPML_DTYPE_I32, 1, answers);
    hpml_fit_desc fit = { .epochs = 5, .validation = d };
    hpml_trainer_fit(t, d, &fit);
    SHOW(hpml_trainer_history(t, rows, 8) == 5 && rows[4].epoch == 4 && rows[4].loss > 0);
    SHOW(hpml_trainer_predict_data(t, d, scores) == HPML_OK);
    hpml_step_info info = { .epoch = 1, .epoch_step = 3, .epoch_steps = 10, .loss = 0.5f, .accuracy = -1 };
    SHOW(strlen(hpml_progress_text(&info, 5, 60, line, sizeof line)) <= 60);
}

/* How well outputs tell yes from no: of the 4 pairs of a yes and a no, 3 have the larger output at the yes. */
static void yes_or_no(hpml_ctx *ctx)
{
    const float   x[4] = { 0.1f, 0.4f, 0.35f, 0.8f }, yes[4] = { 0, 0, 1, 1 }, one = 1;
    const int64_t shape[1] = { 1 };
    hpml_tensor  *in = hpml_input_2d(ctx, 4, 1);
    hpml_tensor  *out = hpml_linear(in, 1, &(hpml_linear_desc){ .name = "score", .no_bias = true });
    hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = in, .output = out,
                                                                     .loss = HPML_LOSS_BCE });
    hpml_dataset *d = hpml_dataset_create(ctx, 4, HPML_DTYPE_F32, 1, shape, x, HPML_DTYPE_F32, 1, yes);
    hpml_metrics  m = { .want_auc = true };
    hpml_tensor_set(hpml_param_find(ctx, "score.weight"), &one, 1);
    SHOW(hpml_trainer_evaluate(t, d, &m) == HPML_OK && m.auc == 0.75 && m.recall == 1 && m.precision == 0.5);
}

int main(void)
{
    hpml_ctx *ctx[8];
    int       failed = 0;
    for (int i = 0; i < 8; i++) ctx[i] = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 7, .threads = 1 });
    settings(ctx[0]);
    by_hand(ctx[1], ctx[2]);
    hooks(ctx[3]);
    shards(ctx[4]);
    epochs(ctx[5]);
    halves(ctx[6]);
    yes_or_no(ctx[7]);
    for (int i = 0; i < 8; i++) failed |= tour_end(ctx[i]);
    return failed;
}
