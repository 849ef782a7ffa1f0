/* Hooks that stack, the trainer's arrays and steps of a range of them, parameters in memory of the user's. */
#include "../hpml.h"
#include "test.h"

enum { BATCH = 8, INPUTS = 6 };

/* Samples of BATCH * INPUTS numbers and their labels of 3 classes. */
static float   xs[4][BATCH * INPUTS];
static int32_t ys[4][BATCH];
static void fill(void)
{
    for (int b = 0; b < 4; b++)
        for (int i = 0; i < BATCH * INPUTS; i++) xs[b][i] = (float)((i * 37 + b * 11) % 23 - 11) / 11;
    for (int b = 0; b < 4; b++)
        for (int i = 0; i < BATCH; i++) ys[b][i] = (i + b) % 3;
}

/* Records a model with running statistics between its weights; with a trainer of the other fields of d. */
static hpml_trainer *model(hpml_ctx *ctx, hpml_trainer_desc d)
{
    fill();
    d.input  = hpml_input_2d(ctx, BATCH, INPUTS);
    d.output = hpml_linear(hpml_relu(hpml_batchnorm(hpml_linear(d.input, 5, NULL), NULL)), 3, NULL);
    return hpml_trainer_create(ctx, &d);
}

static hpml_status train(hpml_trainer *t, int steps)
{
    hpml_status status = HPML_OK;
    for (int k = 0; k < steps && status == HPML_OK; k++)
        status = hpml_trainer_step(t, xs[k % 4], ys[k % 4], BATCH, NULL);
    return status;
}

/* ---- arrays and ranges */

/* Values, gradients and states have one layout, which is that of the parameters' pointers. */
TEST(values_gradients_and_states_are_arrays_of_one_layout)
{
    for (int early = 0; early < 3; early++) { /* parameters get memory: by the trainer, by init, in the user's memory */
        hpml_ctx    *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 3 });
        hpml_tensor *x = hpml_input_2d(ctx, BATCH, INPUTS);
        hpml_tensor *y = hpml_linear(hpml_relu(hpml_batchnorm(hpml_linear(x, 5, NULL), NULL)), 3, NULL);
        float       *own = (float *)aligned_alloc(64, hpml_params_bytes(ctx));
        if (early == 1) ENSURE(hpml_param_init(ctx) == HPML_OK);
        if (early == 2) ENSURE(hpml_params_place(ctx, own, false) == HPML_OK);
        hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = x, .output = y,
                                                                         .optimizer = HPML_OPT_ADAM });
        int64_t floats[4], at = 0;
        float  *values = hpml_trainer_array(t, HPML_ARRAY_VALUES, &floats[0]);
        float  *grads  = hpml_trainer_array(t, HPML_ARRAY_GRADIENTS, &floats[1]);
        float  *mean   = hpml_trainer_array(t, HPML_ARRAY_STATE, &floats[2]);
        float  *square = hpml_trainer_array(t, (hpml_array)(HPML_ARRAY_STATE + 1), &floats[3]);
        ENSURE(values && grads && mean && square && (early != 2 || values == own));
        fill();
        ENSURE(train(t, 3) == HPML_OK);
        for (int i = 0; i < hpml_param_count(ctx); i++) {
            const hpml_tensor *p = hpml_param_at(ctx, i);
            if (p->param->buffer) { ENSURE(hpml_trainer_place(t, i) == -1); continue; }
            ENSURE(hpml_trainer_place(t, i) == at && p->data == values + at && p->grad == grads + at);
            ENSURE(mean[at] != 0 || p->grad[0] == 0);
            at += (hpml_tensor_count(p) + HPML_GRADIENT_ALIGN - 1) / HPML_GRADIENT_ALIGN * HPML_GRADIENT_ALIGN;
        }
        for (int k = 0; k < 4; k++) ENSURE(floats[k] == at);
        ENSURE(!hpml_trainer_array(t, (hpml_array)(HPML_ARRAY_STATE + 2), &floats[0]) && floats[0] == 0);
        const int32_t numbers[3] = { -2, INT32_MIN + 1, INT32_MAX };
        for (int k = 0; k < 3; k++) {
            const hpml_array none = (hpml_array)numbers[k];
            ENSURE(!hpml_trainer_array(t, none, &floats[0]) && !hpml_trainer_part(t, 0, none));
        }
        ENSURE(hpml_trainer_part(t, 0, HPML_ARRAY_STATE) == mean);
        ENSURE(hpml_trainer_part(t, 0, HPML_ARRAY_VALUES) == values);
        ENSURE(hpml_trainer_place(t, -1) == -1 && hpml_trainer_place(t, 99) == -1 && hpml_trainer_place(NULL, 0) == -1);
        hpml_ctx_free(ctx);
        free(own);
    }
}

/* Values that cannot be one array: the error names two parameters and the reason. */
TEST(values_that_lie_apart_are_no_array)
{
    for (int late = 0; late < 2; late++) {
        hpml_ctx    *ctx = hpml_ctx_create(NULL);
        hpml_tensor *x = hpml_input_2d(ctx, BATCH, INPUTS);
        hpml_tensor *h = hpml_linear(x, 5, &(hpml_linear_desc){ .name = "a", .no_bias = true });
        if (late) ENSURE(hpml_param_init(ctx) == HPML_OK);
        h = hpml_linear(h, 5, &(hpml_linear_desc){ .name = "b", .no_bias = true });
        hpml_tensor *y = hpml_linear(h, 3, &(hpml_linear_desc){ .name = "c", .no_bias = true });
        if (!late) { /* frozen when it has its memory already */
            ENSURE(hpml_param_init(ctx) == HPML_OK);
            hpml_param_find(ctx, "b.weight")->param->frozen = true;
        }
        hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = x, .output = y });
        ENSURE(t && hpml_trainer_array(t, HPML_ARRAY_GRADIENTS, NULL));
        ENSURE_ERROR(ctx, !hpml_trainer_array(t, HPML_ARRAY_VALUES, NULL), HPML_ERR_UNSUPPORTED,
                     late ? "\"b.weight\" lies apart from \"a.weight\"" : "\"c.weight\" lies apart from \"a.weight\"");
        hpml_ctx_free(ctx);
    }
}

/* Steps the arrays range by range, in ranges that end in the middle of parameters and vectors. */
static hpml_status by_ranges(void *user, hpml_trainer *t, const hpml_moment *at)
{
    int64_t     floats, n = *(int64_t *)user;
    hpml_status status = HPML_OK;
    (void)at;
    hpml_trainer_array(t, HPML_ARRAY_GRADIENTS, &floats);
    for (int64_t first = 0; first < floats && status == HPML_OK; first += n)
        status = hpml_trainer_apply_range(t, first, n < floats - first ? n : floats - first, 1);
    return status;
}

TEST(ranges_step_as_the_whole_does)
{
    static const char *const cpus[] = { "scalar", "avx2", "avx512", "neon" };
    for (int k = 0; k < 4 * 5 * 2; k++) {
        uint64_t hash[3];
        int64_t  n[3] = { 0, 7, 50 };
        for (int i = 0; i < 3; i++) {
            hpml_ctx *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1, .seed = 5, .cpu = cpus[k % 4] });
            if (hpml_ctx_status(ctx) != HPML_OK) { hpml_ctx_free(ctx); hash[i] = 0; continue; }
            hpml_trainer *t = model(ctx, (hpml_trainer_desc){
                .optimizer = (hpml_opt)(k / 4 % 5), .momentum = 0.9f, .weight_decay = 0.01f, .lr = 0.05f,
                .clip_norm = k / 20 ? 0.5f : 0 });
            if (i) hpml_trainer_attach(t, &(hpml_hooks){ .user = &n[i], .update = by_ranges });
            ENSURE(train(t, 6) == HPML_OK && hpml_trainer_step_count(t) == 6);
            hash[i] = hpml_param_hash(ctx);
            hpml_ctx_free(ctx);
        }
        ENSURE(hash[0] == hash[1] && hash[0] == hash[2]);
    }
}

/* grad_scale multiplies gradients before they are clipped: half of twice the gradient is the gradient. */
static hpml_status twice_the_half(void *user, hpml_trainer *t, const hpml_moment *at)
{
    int64_t floats;
    float  *g = hpml_trainer_array(t, HPML_ARRAY_GRADIENTS, &floats);
    (void)user, (void)at;
    for (int64_t i = 0; i < floats; i++) g[i] *= 2;
    return hpml_trainer_apply_range(t, 0, floats, 0.5f);
}

TEST(ranges_scale_their_gradients)
{
    uint64_t hash[2];
    for (int i = 0; i < 2; i++) {
        hpml_ctx     *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 5 });
        hpml_trainer *t = model(ctx, (hpml_trainer_desc){ .lr = 0.05f, .clip_norm = 0.25f });
        if (i) hpml_trainer_attach(t, &(hpml_hooks){ .update = twice_the_half });
        ENSURE(train(t, 6) == HPML_OK);
        hash[i] = hpml_param_hash(ctx);
        hpml_ctx_free(ctx);
    }
    ENSURE(hash[0] == hash[1]);
}

TEST(wrong_ranges_are_errors)
{
    static const hpml_opt whole[] = { HPML_OPT_LARS, HPML_OPT_LAMB };
    for (int k = 0; k < 2; k++) {
        hpml_ctx     *ctx = hpml_ctx_create(NULL);
        hpml_trainer *t   = model(ctx, (hpml_trainer_desc){ .optimizer = whole[k] });
        ENSURE_ERROR(ctx, hpml_trainer_apply_range(t, 0, 1, 1), HPML_ERR_UNSUPPORTED, k ? "lamb can" : "lars can");
        ENSURE_ERROR(ctx, hpml_trainer_apply_range(t, -1, 1, 1), HPML_ERR_ARGUMENT, "1 floats from number -1");
        ENSURE_ERROR(ctx, hpml_trainer_apply_range(t, 8, 1 << 20, 1), HPML_ERR_ARGUMENT, "from number 8");
        ENSURE_ERROR(ctx, hpml_trainer_apply_range(t, 0, 1, 0), HPML_ERR_ARGUMENT, "times 0");
        hpml_ctx_free(ctx);
    }
    ENSURE(hpml_trainer_apply_range(NULL, 0, 1, 1) == HPML_ERR_ARGUMENT);
}

/* ---- own memory */

/* Two contexts train the same values in turns, as one does alone; the memory outlives both. */
TEST(contexts_share_parameters_in_memory_of_the_users)
{
    uint64_t hash[2];
    float   *memory = NULL;
    for (int shared = 0; shared < 2; shared++) {
        hpml_ctx     *ctx[2] = { NULL, NULL };
        hpml_trainer *t[2]   = { NULL, NULL };
        for (int i = 0; i <= shared; i++) {
            ctx[i] = hpml_ctx_create(&(hpml_ctx_desc){ .seed = i ? 99 : 4 });
            hpml_tensor *x = hpml_input_2d(ctx[i], BATCH, INPUTS), *y = hpml_linear(hpml_linear(x, 5, NULL), 3, NULL);
            if (!memory) memory = (float *)aligned_alloc(64, hpml_params_bytes(ctx[i]));
            if (shared) ENSURE(hpml_params_place(ctx[i], memory, i > 0) == HPML_OK);
            t[i] = hpml_trainer_create(ctx[i], &(hpml_trainer_desc){ .input = x, .output = y, .lr = 0.1f });
            ENSURE(t[i] && hpml_trainer_array(t[i], HPML_ARRAY_VALUES, NULL));
        }
        fill();
        for (int k = 0; k < 8; k++)
            ENSURE(hpml_trainer_step(t[shared * (k % 2)], xs[k % 4], ys[k % 4], BATCH, NULL) == HPML_OK);
        hash[shared] = hpml_param_hash(ctx[shared]);
        for (int i = 0; i <= shared; i++) hpml_ctx_free(ctx[i]);
    }
    ENSURE(hash[0] == hash[1] && memory[0] == memory[0]);
    free(memory);
}

TEST(memory_that_parameters_cannot_have_is_an_error)
{
    hpml_backend device = *hpml_backend_cpu();
    float       *memory = (float *)aligned_alloc(64, 1 << 12);
    device.host = false;
    device.name = "device";
    for (int k = 0; k < 2; k++) {
        hpml_ctx    *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .backend = k ? &device : NULL });
        hpml_tensor *x = hpml_input_2d(ctx, BATCH, INPUTS);
        ENSURE(hpml_params_bytes(ctx) == 0 && hpml_linear(x, 3, &(hpml_linear_desc){ .name = "a" }));
        ENSURE(hpml_params_bytes(ctx) == sizeof(float) * (32 + 16));
        ENSURE_ERROR(ctx, hpml_params_place(ctx, NULL, false), HPML_ERR_ARGUMENT, "a multiple of 64 bytes");
        ENSURE_ERROR(ctx, hpml_params_place(ctx, memory + 1, false), HPML_ERR_ARGUMENT, "a multiple of 64 bytes");
        if (k) ENSURE_ERROR(ctx, hpml_params_place(ctx, memory, false), HPML_ERR_UNSUPPORTED, "\"device\"");
        ENSURE(hpml_param_init(ctx) == HPML_OK);
        if (!k) ENSURE_ERROR(ctx, hpml_params_place(ctx, memory, false), HPML_ERR_STATE, "\"a.weight\" has memory");
        hpml_ctx_free(ctx);
    }
    ENSURE(hpml_params_place(NULL, memory, false) == HPML_ERR_ARGUMENT);
    free(memory);
}

/* ---- hooks */

typedef struct record { char text[1024]; } record;
typedef struct layer { record *to; char name; int freed; } layer;

static void note(void *user, const char *what)
{
    layer *l = (layer *)user;
    size_t n = strlen(l->to->text);
    snprintf(l->to->text + n, sizeof l->to->text - n, "%s%c ", what, l->name);
}
static hpml_status on_run(void *user, hpml_trainer *t, const hpml_moment *at, int64_t samples, float *loss)
{
    note(user, at->pass == HPML_PASS_TRAIN && at->param == -1 ? "run" : "wrong");
    hpml_status status = hpml_trainer_run_inner(t, samples, loss);
    note(user, "ran");
    return status;
}
static hpml_status on_grad(void *user, hpml_trainer *t, const hpml_moment *at)
{
    (void)t;
    if (at->param == 0) note(user, at->pass == HPML_PASS_BACKWARD && at->node ? "grad" : "wrong");
    return HPML_OK;
}
static hpml_status on_update(void *user, hpml_trainer *t, const hpml_moment *at)
{
    note(user, at->pass == HPML_PASS_UPDATE && !at->node ? "update" : "wrong");
    return hpml_trainer_update_inner(t);
}
static void on_free(void *user)
{
    layer *l = (layer *)user;
    l->freed++;
    note(user, "free");
}

/* Three sets of hooks change no bit; calls come in the documented order, and each set is detached by itself. */
TEST(hooks_stack)
{
    record   r = { "" };
    layer    l[3] = { { &r, 'a', 0 }, { &r, 'b', 0 }, { &r, 'c', 0 } };
    uint64_t hash[2];
    for (int hooked = 0; hooked < 2; hooked++) {
        hpml_ctx     *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 2 });
        hpml_trainer *t   = model(ctx, (hpml_trainer_desc){ .lr = 0.1f });
        int           count;
        hpml_hooks    h = { .run = on_run, .grad = on_grad, .update = on_update, .free = on_free };
        for (int k = 0; k < 3 && hooked; k++) {
            h.user = &l[k];
            if (k == 1) h.run = NULL;
            if (k == 2) h.run = on_run, h.update = NULL;
            ENSURE(hpml_trainer_attach(t, &h) == HPML_OK);
        }
        ENSURE(hpml_trainer_hooks(t, &count) && count == 3 * hooked);
        ENSURE(train(t, 1) == HPML_OK);
        if (hooked) ENSURE(strcmp(r.text, "runc runa grada gradb gradc rana ranc updateb updatea ") == 0);
        r.text[0] = 0;
        hpml_trainer_detach(t, &l[1]);
        hpml_trainer_detach(t, &r); /* no set has this user */
        ENSURE(train(t, 1) == HPML_OK);
        if (hooked) ENSURE(strcmp(r.text, "freeb runc runa grada gradc rana ranc updatea ") == 0);
        r.text[0] = 0;
        hash[hooked] = hpml_param_hash(ctx);
        hpml_ctx_free(ctx);
    }
    ENSURE(hash[0] == hash[1] && strcmp(r.text, "freec freea ") == 0 && l[0].freed + l[1].freed + l[2].freed == 3);
}

/* A hook that computes gradients by a graph in another context, over the trainer's values; *user: 1: wrong ones. */
static hpml_status by_other_context(void *user, hpml_trainer *t, const hpml_moment *at, int64_t samples, float *loss)
{
    hpml_ctx    *ctx   = hpml_ctx_create(&(hpml_ctx_desc){ .log = hpml_log_stderr });
    hpml_tensor *x     = hpml_input_2d(ctx, samples, INPUTS), *label = hpml_input(ctx, HPML_DTYPE_I32, 1, &samples);
    hpml_tensor *y     = hpml_linear(hpml_relu(hpml_linear(x, 5, NULL)), 3, NULL);
    hpml_tensor *mean  = hpml_cross_entropy(y, label, NULL);
    float       *sum   = hpml_trainer_array(t, HPML_ARRAY_GRADIENTS, NULL);
    const float  scale = 1 / (float)at->batches;
    hpml_params_place(ctx, hpml_trainer_array(t, HPML_ARRAY_VALUES, NULL), true);
    hpml_graph *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .loss = mean });
    hpml_graph_alloc(g);
    hpml_tensor_set(x, xs[(at->step * at->batches + at->batch) % 4], samples * INPUTS);
    hpml_tensor_set_raw(label, ys[(at->step * at->batches + at->batch) % 4], (size_t)samples * 4);
    hpml_graph_forward(g, true, 0);
    hpml_graph_backward(g, scale, false);
    for (int p = 0; p < hpml_param_count(ctx); p++) {
        const hpml_tensor *w = hpml_param_at(ctx, p);
        for (int64_t i = 0; i < hpml_tensor_count(w); i++) {
            float *to = &sum[hpml_trainer_place(t, p) + i];
            *to = w->grad[i] + (at->batch > 0 ? *to : 0);
        }
    }
    if (*(const int *)user == 1) sum[0] = NAN;
    hpml_tensor_get(mean, loss, 1);
    hpml_status status = hpml_ctx_status(ctx);
    hpml_ctx_free(ctx);
    return status;
}

/* The bits are those of the trainer's own passes, also for the sum of micro-batches; a NaN is found and named. */
TEST(a_run_hook_may_compute_gradients_in_another_context)
{
    int wrong = 0;
    fill();
    for (int accumulate = 1; accumulate <= 2; accumulate++) {
        uint64_t hash[2];
        for (int other = 0; other < 2; other++) {
            hpml_ctx     *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 7 });
            hpml_tensor  *x   = hpml_input_2d(ctx, BATCH, INPUTS);
            hpml_trainer *t   = hpml_trainer_create(ctx, &(hpml_trainer_desc){
                .input = x, .output = hpml_linear(hpml_relu(hpml_linear(x, 5, NULL)), 3, NULL),
                .optimizer = HPML_OPT_ADAM, .accumulate = accumulate });
            if (other) hpml_trainer_attach(t, &(hpml_hooks){ .user = &wrong, .run = by_other_context });
            ENSURE(train(t, 6) == HPML_OK && hpml_trainer_step_count(t) == 6 / accumulate);
            hash[other] = hpml_param_hash(ctx);
            wrong = other * accumulate == 2;
            if (wrong) ENSURE_ERROR(ctx, train(t, 2), HPML_ERR_NONFINITE, "the gradient of \"linear0.weight\"");
            hpml_ctx_free(ctx);
        }
        ENSURE(hash[0] == hash[1]);
    }
}

TEST(wrong_uses_of_hooks_are_errors)
{
    hpml_ctx     *ctx = hpml_ctx_create(NULL);
    hpml_trainer *t   = model(ctx, (hpml_trainer_desc){ .lr = 0.1f });
    hpml_hooks    none = { .user = NULL };
    float         loss;
    ENSURE_ERROR(ctx, hpml_trainer_run_inner(t, BATCH, &loss), HPML_ERR_STATE, "no hook `run` is running");
    ENSURE_ERROR(ctx, hpml_trainer_update_inner(t), HPML_ERR_STATE, "no hook `update` is running");
    for (int k = 0; k < HPML_MAX_HOOKS; k++) ENSURE(hpml_trainer_attach(t, &none) == HPML_OK);
    ENSURE_ERROR(ctx, hpml_trainer_attach(t, &none), HPML_ERR_STATE, "8 sets of hooks");
    ENSURE(hpml_trainer_attach(t, NULL) == HPML_ERR_ARGUMENT && hpml_trainer_attach(NULL, &none) == HPML_ERR_ARGUMENT);
    hpml_trainer_detach(t, NULL); /* all of them */
    ENSURE(hpml_trainer_attach(t, &none) == HPML_OK);
    ENSURE(hpml_trainer_run_inner(NULL, 1, &loss) == HPML_ERR_ARGUMENT);
    hpml_trainer_detach(NULL, NULL);
    hpml_ctx_free(ctx);
}

/* A hook that computes a micro-batch by itself, as the moment says; and one that leaves this to the trainer. */
static hpml_status by_moment(void *user, hpml_trainer *t, const hpml_moment *at, int64_t samples, float *loss)
{
    int *wrong = (int *)user;
    *wrong += at->batches != 3 || at->batch != wrong[1]++ % 3 || at->step != hpml_trainer_step_count(t);
    return hpml_trainer_forward_backward(t, 0, samples, 1 / (float)at->batches, at->batch > 0, loss);
}
static hpml_status by_trainer(void *user, hpml_trainer *t, const hpml_moment *at, int64_t samples, float *loss)
{
    (void)user, (void)at;
    return hpml_trainer_run_inner(t, samples, loss);
}

TEST(a_run_hook_knows_its_micro_batch)
{
    uint64_t hash[3], uneven[2];
    int      wrong[2] = { 0, 0 };
    for (int k = 0; k < 3; k++) {
        hpml_ctx     *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 2 });
        hpml_trainer *t   = model(ctx, (hpml_trainer_desc){ .lr = 0.1f, .momentum = 0.9f, .accumulate = 3 });
        hpml_hooks    h   = { .user = wrong, .run = k == 1 ? by_moment : by_trainer };
        if (k) hpml_trainer_attach(t, &h);
        ENSURE(train(t, 9) == HPML_OK && hpml_trainer_step_count(t) == 3);
        hash[k] = hpml_param_hash(ctx);
        if (k == 1) { hpml_ctx_free(ctx); continue; }
        hpml_tensor  *x = hpml_input_2d(ctx, BATCH, INPUTS);
        hpml_trainer *u = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = x, .lr = 0.1f, .accumulate = 3,
                                                                         .output = hpml_linear(x, 3, NULL) });
        if (k) hpml_trainer_attach(u, &h);
        for (int b = 0; b < 3; b++)
            ENSURE(hpml_trainer_step(u, xs[b], ys[b], b ? BATCH - 3 * b : BATCH, NULL) == HPML_OK);
        uneven[k / 2] = hpml_param_hash(ctx);
        hpml_ctx_free(ctx);
    }
    ENSURE(hash[0] == hash[1] && hash[0] == hash[2] && uneven[0] == uneven[1] && wrong[0] == 0 && wrong[1] == 9);
}

/* need and release: each parameter that is read is released once in a pass, after its last reader. */
typedef struct reading { int open[8], needs, releases, wrong, evaluated; } reading;
static hpml_status on_need(void *user, hpml_trainer *t, const hpml_moment *at)
{
    reading *r = (reading *)user;
    (void)t;
    r->open[at->param]++;
    r->needs++;
    r->evaluated += at->pass == HPML_PASS_EVALUATE;
    return HPML_OK;
}
static hpml_status on_release(void *user, hpml_trainer *t, const hpml_moment *at)
{
    reading *r = (reading *)user;
    (void)t;
    r->wrong += r->open[at->param] == 0 || !at->node;
    r->open[at->param] = 0;
    r->releases++;
    return HPML_OK;
}

TEST(values_are_released_after_their_last_reader)
{
    reading      r = { { 0 }, 0, 0, 0, 0 };
    hpml_ctx    *ctx = hpml_ctx_create(NULL);
    hpml_tensor *x = hpml_input_2d(ctx, BATCH, INPUTS);
    hpml_tensor *w = hpml_param_create(ctx, &(hpml_param_desc){ .ndim = 2, .shape = { INPUTS, INPUTS } });
    hpml_tensor *h = hpml_matmul(hpml_relu(hpml_matmul(x, w, false, false)), w, false, false); /* w is read twice */
    hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = x, .output = hpml_linear(h, 3, NULL) });
    float         out[3];
    ENSURE(t && hpml_trainer_attach(t, &(hpml_hooks){ .user = &r, .need = on_need, .release = on_release }) == HPML_OK);
    fill();
    ENSURE(train(t, 1) == HPML_OK);
    for (int i = 0; i < 8; i++) ENSURE(r.open[i] == 0);
    ENSURE(r.needs == 8 && r.releases == 6 && r.wrong == 0 && r.evaluated == 0);
    ENSURE(hpml_trainer_predict(t, xs[0], 1, out) == HPML_OK);
    ENSURE(r.needs == 12 && r.releases == 9 && r.wrong == 0 && r.evaluated == 4);
    hpml_ctx_free(ctx);
}

/* A copy of the CPU's table with an `update` of its own is a backend on the host: it has own optimizers, and takes all
   steps, also those of a layer whose step the CPU takes within the backward pass. */
static int stepped;
static hpml_status counted(void *device, hpml_ctx *ctx, const hpml_update *updates, int count)
{
    for (int i = 0; i < count; i++) stepped += updates[i].n > 0;
    return hpml_backend_cpu()->update(device, ctx, updates, count);
}
static void plain_step(const hpml_update *u, float *w, float *g, float *const *state, int64_t n)
{
    (void)state;
    for (int64_t i = 0; i < n; i++) w[i] -= u->lr * g[i];
}

TEST(a_copy_of_the_cpus_table_is_on_the_host)
{
    static const hpml_optimizer plain = { .name = "plain", .lr = 0.1f, .step = plain_step };
    hpml_backend copy = *hpml_backend_cpu();
    copy.name   = "copy";
    copy.update = counted;
    hpml_ctx     *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1, .backend = &copy });
    hpml_tensor  *x = hpml_input_2d(ctx, BATCH, INPUTS);
    hpml_tensor  *h = hpml_linear(hpml_linear(x, 1024, NULL), 256, NULL); /* a step of 2^18 numbers */
    hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = x, .output = hpml_linear(h, 3, NULL), .custom_optimizer = &plain });
    fill();
    stepped = 0;
    ENSURE(t && train(t, 2) == HPML_OK && stepped == 2 * 6);
    hpml_ctx_free(ctx);
}

/* ---- gradients of embeddings as rows */

enum { TABLE = 40, WIDTH = 5, WORDS = 3 };

/* A bag of words: two embeddings of one table, of the classes of BATCH * WORDS tokens. */
static hpml_trainer *words(hpml_ctx *ctx, bool sparse, hpml_trainer_desc d)
{
    hpml_embedding_desc e = { .name = "e", .sparse = sparse };
    d.input = hpml_input_tokens(ctx, BATCH, WORDS);
    hpml_tensor *a = hpml_embedding(d.input, TABLE, WIDTH, &e);
    e.name   = "f";
    e.weight = hpml_param_find(ctx, "e.weight");
    hpml_tensor *b = hpml_embedding(d.input, TABLE, WIDTH, &e);
    d.output = hpml_linear(hpml_sum(hpml_mul(a, hpml_tanh(b)), 1), 3, NULL);
    return hpml_trainer_create(ctx, &d);
}

/* Tokens of step k: with repetitions, and rows that no step has. */
static void speak(int k, int32_t *tokens, int32_t *labels)
{
    for (int i = 0; i < BATCH * WORDS; i++) tokens[i] = (i * 7 + k * 11) % 13 * 3;
    for (int i = 0; i < BATCH; i++) labels[i] = (tokens[i * WORDS] + tokens[i * WORDS + 1]) % 3;
}

/* Sparse and dense tables have the same bits with SGD, in short batches, with accumulation, in halves, by two trainers
   in turns; rows with a gradient are those of the tokens, and what is behind these rows in `grad` has no influence. */
TEST(sparse_tables_train_as_dense_ones)
{
    for (int kind = 0; kind < 6; kind++) {
        uint64_t hash[2];
        float    gradient[2][TABLE * WIDTH];
        for (int sparse = 0; sparse < 2; sparse++) {
            hpml_ctx_desc cd = { .seed = 3, .threads = 1 + kind % 2 };
            if (kind == 4) cd.activation_dtype = HPML_DTYPE_BF16;
            hpml_ctx     *ctx = hpml_ctx_create(&cd);
            hpml_trainer *t = words(ctx, sparse, (hpml_trainer_desc){
                .lr = 0.3f, .accumulate = kind == 2 ? 3 : 1, .optimizer = kind == 5 ? HPML_OPT_ADAGRAD : HPML_OPT_SGD
            });
            ENSURE(t);
            for (int k = 0; k < 12; k++) {
                int32_t tokens[BATCH * WORDS], labels[BATCH];
                int64_t count = -1;
                speak(k, tokens, labels);
                ENSURE(hpml_trainer_alloc(t) == HPML_OK);
                hpml_tensor *table = hpml_param_find(ctx, "e.weight");
                hpml_param_rows(table, &count);
                for (int64_t i = count * WIDTH; i < TABLE * WIDTH && sparse && table->grad; i++) table->grad[i] = NAN;
                ENSURE(hpml_trainer_step(t, tokens, labels, kind == 3 ? 1 + k % BATCH : BATCH, NULL) == HPML_OK);
                const int32_t *rows = hpml_param_rows(table, &count);
                ENSURE(sparse ? rows && count > 0 && count <= 13 : !rows && count == 0);
                for (int64_t i = 0; i < count; i++) ENSURE(rows[i] % 3 == 0);
            }
            int index = 0;
            while (hpml_param_at(ctx, index) != hpml_param_find(ctx, "e.weight")) index++;
            ENSURE(hpml_trainer_collect(t, index, HPML_ARRAY_GRADIENTS, gradient[sparse]) == HPML_OK);
            hash[sparse] = hpml_param_hash(ctx);
            hpml_ctx_free(ctx);
        }
        ENSURE(hash[0] == hash[1]);
        for (int i = 0; i < TABLE * WIDTH; i++) ENSURE_NEAR(gradient[0][i], gradient[1][i], 0);
    }
}

TEST(gradients_of_sparse_tables_agree_with_differences)
{
    double worst[2];
    for (int sparse = 0; sparse < 2; sparse++) {
        hpml_ctx     *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 3 });
        hpml_trainer *t = words(ctx, sparse, (hpml_trainer_desc){ .lr = 0.1f });
        int32_t       tokens[BATCH * WORDS], labels[BATCH];
        speak(1, tokens, labels);
        ENSURE(hpml_trainer_step(t, tokens, labels, BATCH, NULL) == HPML_OK);
        worst[sparse] = hpml_check_grad(hpml_trainer_graph(t), 0, 300);
        hpml_ctx_free(ctx);
    }
    ENSURE(worst[0] > 0 && worst[0] < 1e-2);
    ENSURE_NEAR(worst[1], worst[0], 0);
}

/* Lazy updates: a row that a step does not have keeps its value and its states, weight decay included. */
TEST(rows_without_a_gradient_stay)
{
    hpml_ctx     *ctx = hpml_ctx_create(NULL);
    hpml_trainer *t   = words(ctx, true, (hpml_trainer_desc){ .optimizer = HPML_OPT_ADAM, .weight_decay = 0.1f });
    hpml_tensor  *p   = hpml_param_find(ctx, "e.weight");
    int32_t       tokens[BATCH * WORDS] = { 0 }, labels[BATCH] = { 0, 1, 2 };
    float         before[TABLE * WIDTH];
    ENSURE(t && hpml_tensor_get(p, before, TABLE * WIDTH) == HPML_OK);
    for (int i = 0; i < BATCH * WORDS; i++) tokens[i] = i % 2 ? 7 : 30;
    for (int k = 0; k < 3; k++) ENSURE(hpml_trainer_step(t, tokens, labels, BATCH, NULL) == HPML_OK);
    const float *mean = hpml_trainer_array(t, HPML_ARRAY_STATE, NULL) + hpml_trainer_place(t, p->param->index);
    for (int i = 0; i < TABLE * WIDTH; i++) {
        bool has = i / WIDTH == 7 || i / WIDTH == 30;
        ENSURE((p->data[i] != before[i]) == has && (mean[i] != 0) == has);
    }
    hpml_ctx_free(ctx);
}

TEST(sparse_tables_that_cannot_be_are_errors)
{
    const hpml_trainer_desc wrong[] = { { .clip_norm = 1 }, { .optimizer = HPML_OPT_LAMB },
                                        { .optimizer = HPML_OPT_LARS } };
    const char *const       says[]  = { "clip_norm", "lamb needs", "lars needs" };
    hpml_backend device = *hpml_backend_cpu();
    device.host = false;
    for (int k = 0; k < 3; k++) {
        hpml_ctx *ctx = hpml_ctx_create(NULL);
        ENSURE_ERROR(ctx, !words(ctx, true, wrong[k]), HPML_ERR_UNSUPPORTED, says[k]);
        hpml_ctx_free(ctx);
    }
    hpml_ctx    *ctx = hpml_ctx_create(NULL);
    hpml_tensor *x = hpml_input_tokens(ctx, BATCH, WORDS), *data = hpml_tensor_create_2d(ctx, TABLE, WIDTH);
    hpml_tensor *h = hpml_embedding(x, TABLE, WIDTH, &(hpml_embedding_desc){ .name = "e", .sparse = true });
    hpml_tensor *e = hpml_param_find(ctx, "e.weight"), *y = hpml_linear(h, TABLE, &(hpml_linear_desc){ .weight = e });
    const int32_t far[] = { TABLE };
    ENSURE_ERROR(ctx, !hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = x, .output = y }), HPML_ERR_UNSUPPORTED,
                 "reads the table \"e.weight\" of a sparse embedding");
    hpml_tensor *late = hpml_embedding(x, TABLE, WIDTH, &(hpml_embedding_desc){ .name = "late" });
    hpml_tensor *z = hpml_linear(h, TABLE, &(hpml_linear_desc){ .weight = e }); /* after `late`, in a graph as well */
    hpml_tensor *both = hpml_add(hpml_mean(late, HPML_ALL_DIMS), hpml_mean(z, HPML_ALL_DIMS));
    ENSURE_ERROR(ctx, !hpml_graph_create(ctx, &(hpml_graph_desc){ .loss = both }), HPML_ERR_UNSUPPORTED,
                 "reads the table \"e.weight\" of a sparse embedding");
    late = hpml_param_find(ctx, "late.weight"); /* the graph that failed has no gradient of this table */
    ENSURE(hpml_embedding(x, TABLE, WIDTH, &(hpml_embedding_desc){ .weight = late, .sparse = true }));
    hpml_tensor *dense = hpml_embedding(x, TABLE, WIDTH, &(hpml_embedding_desc){ .name = "dense" });
    ENSURE(hpml_graph_create(ctx, &(hpml_graph_desc){ .loss = hpml_mean(dense, HPML_ALL_DIMS) }));
    hpml_tensor *planned = hpml_param_find(ctx, "dense.weight");
    ENSURE_ERROR(ctx, !hpml_embedding(x, TABLE, WIDTH, &(hpml_embedding_desc){ .weight = planned, .sparse = true }),
                 HPML_ERR_UNSUPPORTED, "has the whole gradient of \"dense.weight\"");
    ENSURE_ERROR(ctx, !hpml_embedding(x, TABLE, WIDTH, &(hpml_embedding_desc){ .weight = data, .sparse = true }),
                 HPML_ERR_UNSUPPORTED, ".sparse is for parameters");
    ENSURE_ERROR(ctx, hpml_param_add_rows(data, true, far, xs[0], 1), HPML_ERR_STATE, "has no sparse gradient");
    hpml_trainer *t = words(ctx, true, (hpml_trainer_desc){ .lr = 0.1f });
    ENSURE(!t && hpml_ctx_status(ctx) != HPML_OK); /* a second "e.weight" */
    hpml_ctx_free(ctx);
    ctx = hpml_ctx_create(NULL);
    t   = words(ctx, true, (hpml_trainer_desc){ .lr = 0.1f });
    ENSURE_ERROR(ctx, hpml_param_add_rows(hpml_param_find(ctx, "e.weight"), true, far, xs[0], 1), HPML_ERR_SHAPE,
                 "row 40");
    hpml_ctx_free(ctx);
    ctx = hpml_ctx_create(&(hpml_ctx_desc){ .backend = &device });
    ENSURE_ERROR(ctx, !words(ctx, true, (hpml_trainer_desc){ .lr = 0.1f }), HPML_ERR_UNSUPPORTED, "on the host");
    hpml_ctx_free(ctx);
}

/* Notes each need as a sign (+ forward, - backward, * again) and the op's first parameter; compares the op that runs
   next with the one announced by hpml_graph_ahead. */
typedef struct needs {
    const hpml_graph *g;
    const hpml_node  *announced; /* the next op with a parameter */
    char              text[256];
    int               wrong, grads[8];
} needs;

static const hpml_tensor *parameter_of(const hpml_node *n)
{
    for (int k = 0; k < n->src_count; k++)
        if (n->src[k] && n->src[k]->param) return n->src[k];
    return NULL;
}

static hpml_status note_need(void *user, hpml_trainer *t, const hpml_moment *at)
{
    needs            *own   = (needs *)user;
    const char       *sign  = at->pass == HPML_PASS_AGAIN ? "*" : "-";
    size_t            n     = strlen(own->text);
    int               place = 0;
    const hpml_node  *next  = at->node;
    (void)t;
    if (parameter_of(at->node)->param->index != at->param) return HPML_OK;
    if (at->pass == HPML_PASS_FORWARD) sign = "+";
    snprintf(own->text + n, sizeof own->text - n, "%s%d", sign, at->param);
    if (own->announced && own->announced != at->node) own->wrong++;
    do next = hpml_graph_ahead(own->g, &place);
    while (next && !parameter_of(next));
    own->announced = next;
    return HPML_OK;
}

static hpml_status note_grad(void *user, hpml_trainer *t, const hpml_moment *at)
{
    (void)t;
    ((needs *)user)->grads[at->param]++;
    return HPML_OK;
}

/* An op that runs again needs its parameters; a parameter that an op reads twice is needed, and final, once. */
TEST(needs_of_ops_that_run_again_and_of_those_ahead)
{
    hpml_ctx    *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 2, .threads = 1 });
    hpml_tensor *x = hpml_input_2d(ctx, BATCH, INPUTS), *y = x, *w;
    hpml_linear_desc relu = { .activation = HPML_ACT_RELU, .no_bias = true };
    for (int l = 0; l < 3; l++) {
        if (l == 1) hpml_recompute(ctx, true);
        y = hpml_relu(hpml_linear(y, INPUTS, &relu));
        if (l == 2) hpml_recompute(ctx, false);
    }
    w = hpml_param_create(ctx, &(hpml_param_desc){ .name = "w", .ndim = 2, .shape = { INPUTS, 3 } });
    y = hpml_matmul(y, hpml_mul(w, w), false, false);
    hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = x, .output = y, .lr = 0.1f });
    needs own = { .g = hpml_trainer_graph(t) };
    ENSURE(hpml_trainer_attach(t, &(hpml_hooks){ .user = &own, .need = note_need, .grad = note_grad }) == HPML_OK);
    ENSURE(hpml_trainer_step(t, xs[0], ys[0], BATCH, NULL) == HPML_OK);
    ENSURE(strcmp(own.text, "+0+1+2+3-3*1*2-2-1-0") == 0 && own.wrong == 0 && !own.announced);
    for (int i = 0; i < 4; i++) ENSURE(own.grads[i] == 1);
    hpml_ctx_free(ctx);
}
