/* Context, errors, memory, threads, tensors, conversions, planning. */
#include "private_api.h"
#include "kernels.h"
#include "meter.h"
#include "test.h"

#include <time.h>
#ifdef __linux__
#include <dirent.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

static hpml_tensor *small_model(hpml_tensor *x)
{
    hpml_conv2d_desc c = { .kernel_h = 3, .padding_h = 1, .activation = HPML_ACT_RELU };
    x = hpml_max_pool2d(hpml_batchnorm(hpml_conv2d(x, 4, &c), NULL), 2, 0, 0);
    return hpml_linear(hpml_dropout(hpml_gelu(hpml_layernorm(hpml_flatten(x), NULL)), 0.1f), 3, NULL);
}

/* Fails the k-th allocation, for k = 2, 3, ... until no allocation fails: each run ends with an error or with success,
   and frees all its memory. */
TEST(failing_allocator_leaks_nothing)
{
    const float   x[2 * 64] = { 0 };
    const int32_t y[2]      = { 0, 1 };
    for (size_t i = 2;; i++) { /* in f32, in halves */
        size_t        k  = i / 2;
        meter         m  = { .fail_at = k };
        hpml_ctx_desc cd = { .threads = 2, .activation_dtype = i % 2 ? HPML_DTYPE_F16 : HPML_DTYPE_F32,
                             .allocator = { meter_alloc, meter_free, &m } };
        hpml_ctx     *ctx = hpml_ctx_create(&cd);
        hpml_tensor  *in  = hpml_input_4d(ctx, 2, 1, 8, 8);
        hpml_trainer *t   = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = in, .output = small_model(in),
                                                                           .optimizer = HPML_OPT_ADAM });
        hpml_status   s   = hpml_trainer_step(t, x, y, 2, NULL);
        bool          done = m.calls < k;
        if (!done) ENSURE(ctx == NULL || (hpml_ctx_status(ctx) == HPML_ERR_MEMORY && s != HPML_OK));
        else ENSURE(s == HPML_OK);
        hpml_ctx_free(ctx);
        ENSURE(m.live == 0);
        if (done && i % 2) break;
        ENSURE(k < 5000);
    }
}

TEST(a_step_does_not_allocate)
{
    const float   x[2 * 64] = { 0 };
    const int32_t y[2]      = { 0, 1 };
    hpml_ctx     *ctx = hpml_ctx_create(NULL);
    hpml_tensor  *in  = hpml_input_4d(ctx, 2, 1, 8, 8);
    hpml_trainer *t   = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = in, .output = small_model(in) });
    size_t        before = hpml_ctx_allocations(ctx);
    for (int i = 0; i < 5; i++) ENSURE(hpml_trainer_step(t, x, y, 2, NULL) == HPML_OK);
    ENSURE(hpml_ctx_allocations(ctx) == before);
    hpml_ctx_free(ctx);
}

static hpml_status copy_and_multiply(const hpml_run *r, hpml_node *n) /* copies, and multiplies by itself */
{
    static float a[300 * 300], c[300 * 300];
    memcpy(n->out->data, n->src[0]->data, (size_t)hpml_tensor_count(n->out) * sizeof *a);
    return hpml_sgemm(r->ctx, false, false, 300, 300, 300, 1, a, 300, a, 300, 0, c, 300);
}

/* An op of the user computes larger products than the layers of its model. */
TEST(a_step_with_products_of_the_user_does_not_allocate)
{
    const hpml_custom own = { .name = "multiplies", .forward = copy_and_multiply };
    hpml_ctx    *ctx = hpml_ctx_create(NULL);
    hpml_tensor *h   = hpml_linear(hpml_input_2d(ctx, 8, 6), 16, NULL), *y = hpml_custom_op(&h, 1, &own);
    hpml_graph  *g   = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &y, .output_count = 1 });
    ENSURE(hpml_graph_alloc(g) == HPML_OK);
    size_t before = hpml_ctx_allocations(ctx);
    ENSURE(hpml_graph_forward(g, false, 0) == HPML_OK && hpml_ctx_allocations(ctx) == before);
    hpml_ctx_free(ctx);
}

/* Working memory of products is taken with the memory of the first graph that multiplies matrices, or at the first
   product of plain arrays. */
TEST(a_context_without_products_is_small)
{
    for (int products = 0; products < 2; products++) {
        const float a[2] = { 1, 2 }, b[2] = { 3, 4 };
        float       c[4];
        hpml_memory m;
        hpml_ctx   *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 4 });
        ENSURE(hpml_ctx_bytes(ctx) < 100000);
        hpml_tensor *x = hpml_input_2d(ctx, 4, 4);
        x = products ? hpml_linear(x, 2, NULL) : hpml_relu(x);
        hpml_graph *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .output_count = 1, .outputs = &x });
        hpml_graph_memory(g, &m);
        ENSURE((m.products > 0) == (products > 0) && hpml_ctx_bytes(ctx) < 100000);
        ENSURE(hpml_graph_alloc(g) == HPML_OK);
        ENSURE(hpml_ctx_bytes(ctx) > m.total && hpml_ctx_bytes(ctx) < m.total + 100000);
        size_t before = hpml_ctx_bytes(ctx);
        ENSURE(hpml_sgemm(ctx, false, false, 2, 2, 1, 1, a, 1, b, 2, 0, c, 2) == HPML_OK && c[3] == 8);
        ENSURE((hpml_ctx_bytes(ctx) > before) == !products);
        hpml_ctx_free(ctx);
    }
}

/* The memory that hpml_trainer_memory reports is the memory allocated, except for the lists of nodes and names. */
TEST(memory_is_known_before_it_is_allocated)
{
    for (int kind = 0; kind < 2; kind++) {
        hpml_ctx         *ctx = hpml_ctx_create(NULL);
        hpml_tensor      *in  = kind ? hpml_input_4d(ctx, 16, 1, 64, 64) : hpml_input_2d(ctx, 1000, 1000);
        hpml_trainer_desc d   = { .input = in, .momentum = 0.9f };
        hpml_memory       m;
        size_t            held;
        d.output = kind ? small_model(in) : hpml_linear(hpml_relu(hpml_linear(in, 2000, NULL)), 500, NULL);
        held     = hpml_ctx_bytes(ctx);
        ENSURE(hpml_trainer_memory(NULL, &d, NULL) == HPML_ERR_ARGUMENT &&
               hpml_trainer_memory(NULL, NULL, &m) == HPML_ERR_ARGUMENT);
        ENSURE(hpml_trainer_memory(ctx, &d, &m) == HPML_OK);
        ENSURE_ERROR(ctx, hpml_trainer_memory(ctx, &d, NULL), HPML_ERR_ARGUMENT, "trainer memory");
        ENSURE(hpml_ctx_bytes(ctx) < held + 20000);
        ENSURE(m.total == m.parameters + m.gradients + m.activations + m.scratch + m.products + m.optimizer);
        ENSURE(m.products > 0 && m.gradients + 4096 >= m.parameters && m.optimizer == m.gradients);
        if (kind == 0)
            ENSURE(m.parameters == 4 * (2000 * 1000 + 2000 + 2000 * 500 + 512) && m.activations >= 4 * 1000 * 3000);
        /* layers in a chain */
        ENSURE(kind ? m.activations < m.unshared * 3 / 4 : m.activations <= m.unshared);
        hpml_trainer *t = hpml_trainer_create(ctx, &d);
        ENSURE(t && hpml_ctx_bytes(ctx) >= held + m.total && hpml_ctx_bytes(ctx) < held + m.total + 24000);
        hpml_ctx_free(ctx);
    }
}

TEST(errors_stick_and_name_things)
{
    hpml_ctx    *ctx = hpml_ctx_create(NULL);
    hpml_tensor *x   = hpml_input_2d(ctx, 4, 5);
    hpml_tensor *y   = hpml_linear(x, 7, &(hpml_linear_desc){ .name = "fc1" });
    ENSURE(hpml_matmul(x, y, false, false) == NULL);
    ENSURE(hpml_ctx_status(ctx) == HPML_ERR_SHAPE);
    ENSURE(strstr(hpml_ctx_error(ctx), "4x5") && strstr(hpml_ctx_error(ctx), "4x7"));
    ENSURE(hpml_relu(hpml_linear(NULL, 3, NULL)) == NULL);
    ENSURE(hpml_linear(x, 3, NULL) == NULL); /* calls on a failed context do nothing */
    hpml_ctx_clear_error(ctx);
    ENSURE(hpml_linear(x, 3, &(hpml_linear_desc){ .name = "fc1" }) == NULL &&
           strstr(hpml_ctx_error(ctx), "fc1.weight"));
    hpml_ctx_clear_error(ctx);
    ENSURE(hpml_input_2d(ctx, 0, 3) == NULL && hpml_ctx_status(ctx) == HPML_ERR_SHAPE);
    hpml_ctx_clear_error(ctx);
    ENSURE(hpml_input_4d(ctx, INT64_MAX / 2, 1000, 1000, 1000) == NULL && hpml_ctx_status(ctx) == HPML_ERR_OVERFLOW);
    hpml_ctx_clear_error(ctx);
    ENSURE(hpml_reshape_2d(x, 3, 7) == NULL && hpml_ctx_status(ctx) == HPML_ERR_SHAPE);
    hpml_ctx_free(ctx);
    ctx = hpml_ctx_create(&(hpml_ctx_desc){ .cpu = "pdp11" });
    ENSURE(hpml_ctx_status(ctx) == HPML_ERR_UNSUPPORTED && strstr(hpml_ctx_error(ctx), "pdp11"));
    hpml_ctx_free(ctx);
    ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = -3 });
    ENSURE(hpml_ctx_status(ctx) == HPML_ERR_ARGUMENT && strstr(hpml_ctx_error(ctx), "-3 threads"));
    hpml_ctx_free(ctx);
    hpml_ctx_desc garbage;
    memset(&garbage, 0xff, sizeof garbage); /* no function of it is called */
    ctx = hpml_ctx_create(&garbage);
    ENSURE(hpml_ctx_status(ctx) == HPML_ERR_ARGUMENT && strstr(hpml_ctx_error(ctx), "canary"));
    hpml_ctx_free(ctx);
    ENSURE(hpml_ctx_status(NULL) == HPML_ERR_ARGUMENT &&
           strcmp(hpml_status_string(HPML_ERR_SHAPE), "shapes do not fit") == 0);
}

TEST(contexts_do_not_mix)
{
    hpml_ctx    *ctx = hpml_ctx_create(NULL), *other = hpml_ctx_create(NULL);
    hpml_tensor *x = hpml_input_2d(ctx, 4, 5), *tokens = hpml_input_tokens(ctx, 4, 5);
    hpml_tensor *y = hpml_linear(hpml_input_2d(other, 4, 5), 7, NULL), *w = hpml_param_at(other, 0); /* (7, 5) */
#define FOREIGN(e) ENSURE((e) == NULL && strstr(hpml_ctx_error(ctx), "context")); hpml_ctx_clear_error(ctx)
    FOREIGN(hpml_add(x, y));
    FOREIGN(hpml_linear(x, 7, &(hpml_linear_desc){ .weight = w }));
    FOREIGN(hpml_embedding(tokens, 7, 5, &(hpml_embedding_desc){ .weight = w }));
    FOREIGN(hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &y, .output_count = 1 }));
    ENSURE(hpml_graph_create(ctx, &(hpml_graph_desc){ .output_count = 1 }) == NULL &&
           hpml_ctx_status(ctx) == HPML_ERR_ARGUMENT);
    hpml_graph_memory(NULL, NULL);
    hpml_ctx_free(other);
    hpml_ctx_free(ctx);
}

static void note(hpml_status status, const char *text, void *user)
{
    snprintf((char *)user, 160, "%d %s", (int)status, text);
}

static hpml_status refuse(hpml_ctx *ctx, const void *desc, void **device)
{
    (void)ctx, (void)desc, (void)device;
    return HPML_ERR_STATE;
}

TEST(contexts_report_their_settings)
{
    char         said[160] = "";
    hpml_backend dead = *hpml_backend_cpu();
    hpml_ctx    *ctx  = hpml_ctx_create(&(hpml_ctx_desc){ .log = note, .log_user = said, .threads = 2 });
    ENSURE(hpml_version() == HPML_VERSION && strcmp(hpml_status_string((hpml_status)7), "unknown status") == 0);
    ENSURE(hpml_ctx_cpu(ctx)[0] && hpml_ctx_device(ctx) && hpml_ctx_threads(ctx) == 2);
    ENSURE(hpml_input_2d(ctx, 0, 3) == NULL && strstr(said, "-100 hpml.h:") && strstr(said, "0x3"));
    hpml_ctx_free(ctx);
    dead.name = "dead", dead.open = refuse;
    ctx = hpml_ctx_create(&(hpml_ctx_desc){ .backend = &dead });
    ENSURE_ERROR(ctx, ctx != NULL, HPML_ERR_STATE, "the backend \"dead\" did not open");
    hpml_ctx_free(ctx);
    ctx = hpml_ctx_create(&(hpml_ctx_desc){ ._end = 1 });
    ENSURE_ERROR(ctx, ctx != NULL, HPML_ERR_ARGUMENT, "canary");
    hpml_ctx_free(ctx);
}

TEST(wrong_calls_on_tensors_are_errors)
{
    hpml_ctx     *ctx = hpml_ctx_create(NULL), *other = hpml_ctx_create(NULL);
    const int64_t six[6] = { 1, 1, 1, 1, 1, 1 };
    hpml_tensor  *t = hpml_tensor_create_2d(ctx, 2, 3), *u, *v;
    hpml_tensor  *in = hpml_input_2d(ctx, 2, 3), *early = hpml_input_2d(ctx, 2, 3);
    float         x[6] = { 1, 2, 3, 4, 5, 6 };
    size_t        held = hpml_ctx_bytes(ctx);
    u = hpml_tensor_create_4d(ctx, 2, 3, 4, 5), v = hpml_view_slice(u, 1, 0, 2);
    ENSURE(v && u->ndim == 4 && u->shape[3] == 5);
    hpml_tensor_free(v);
    hpml_tensor_free(u);
    u = hpml_tensor_create_1d(ctx, 9);
    ENSURE(u && u->ndim == 1 && u->shape[0] == 9);
    hpml_tensor_free(u);
    ENSURE(hpml_ctx_bytes(ctx) == held);
    ENSURE_ERROR(ctx, !hpml_tensor_create(ctx, HPML_DTYPE_F32, 6, six), HPML_ERR_SHAPE, "6 dimensions");
    ENSURE_ERROR(ctx, !hpml_tensor_create(ctx, (hpml_dtype)9, 1, six), HPML_ERR_DTYPE, "unknown dtype 9");
    ENSURE_ERROR(ctx, !hpml_view_reshape(in, 1, six), HPML_ERR_STATE, "it has no memory yet");
    ENSURE_ERROR(ctx, !hpml_view_reshape(t, 1, six), HPML_ERR_SHAPE, "f32 2x3 \"tensor\" to 1");
    ENSURE_ERROR(ctx, !hpml_view_transpose(t, 0, 2), HPML_ERR_SHAPE, "no dimension 0 or 2");
    ENSURE_ERROR(ctx, !hpml_add(in, hpml_view_transpose(hpml_tensor_create_2d(ctx, 3, 2), 0, 1)),
                 HPML_ERR_SHAPE, "view with gaps");
    ENSURE_ERROR(ctx, !hpml_add(in, hpml_input_2d(other, 2, 3)), HPML_ERR_ARGUMENT, "different contexts");
    ENSURE_ERROR(ctx, hpml_convert(ctx, HPML_DTYPE_F32, x, HPML_DTYPE_F32, x, -1), HPML_ERR_ARGUMENT, "n is -1");
    ENSURE_ERROR(ctx, hpml_tensor_copy(t, in), HPML_ERR_SHAPE, "copy of f32 2x3 \"input\"");
    ENSURE_ERROR(ctx, hpml_tensor_set(t, x, 5), HPML_ERR_SHAPE, "6 values, got 5");
    ENSURE_ERROR(ctx, hpml_tensor_set(in, x, 6), HPML_ERR_SHAPE, "no memory yet");
    ENSURE_ERROR(ctx, hpml_tensor_require_grad(hpml_relu(in)), HPML_ERR_ARGUMENT, "only f32 inputs");
    ENSURE_ERROR(ctx, hpml_tensor_require_grad(in), HPML_ERR_STATE, "an op uses it already");
    ENSURE(!in->needs_grad && hpml_tensor_require_grad(early) == HPML_OK);
    ENSURE(hpml_relu(early) && hpml_tensor_require_grad(early) == HPML_OK);
    u = hpml_tensor_create(ctx, HPML_DTYPE_BF16, 2, t->shape);
    ENSURE(hpml_tensor_set(t, x, 6) == HPML_OK && hpml_tensor_copy(u, t) == HPML_OK &&
           ((uint16_t *)u->raw)[1] == 0x4000);
    ENSURE(hpml_tensor_get(u, x, 6) == HPML_OK && x[1] == 2 && !u->data);
    ENSURE_ERROR(ctx, hpml_tensor_get_raw(u, x, sizeof x), HPML_ERR_SHAPE, "expected 12 bytes, got 24");
    ENSURE_ERROR(ctx, hpml_tensor_set_raw(u, x, 13), HPML_ERR_SHAPE, "expected 12 bytes, got 13");
    ENSURE(hpml_tensor_get(t, x, 6) == HPML_OK && x[5] == 6);
    hpml_ctx_free(ctx);
    hpml_ctx_free(other);
}

/* A result that is stored in halves has that dtype, takes half the memory, and is f32 in host memory and NULL as
   `data`; combinations without a meaning are errors. */
TEST(results_stored_in_halves_are_f32_on_the_host)
{
    static const char *const names[] = { "f32", "bf16", "f16" };
    const float v[8] = { 1, -2.5f, 0.15625f, 100, 1.00390625f, 3e-8f, 70000, 0 };
    float       back[8];
    size_t      total[3], activations[3];
    for (int store = 0; store < 3; store++) {
        const float  last = store == 1 ? 70144 : 70000; /* the nearest bf16; that of 1.00390625 is 1: ties go to even */
        hpml_ctx    *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .activation_dtype = (hpml_dtype)store });
        hpml_tensor *x = hpml_input_2d(ctx, 2, 4), *y = hpml_scale(x, 1, 0), *narrow = hpml_mean(y, 1);
        hpml_tensor *deep = hpml_input_2d(ctx, 512, 256), *h = deep, *sum = hpml_mean(y, HPML_ALL_DIMS);
        hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .outputs = &y, .output_count = 1, .loss = sum });
        hpml_memory  m;
        uint16_t     raw;
        ENSURE(y->dtype == (hpml_dtype)store && sum->dtype == HPML_DTYPE_F32 && strncmp(
               hpml_tensor_text(y, (char[64]){ 0 }, 64), names[store], strlen(names[store])) == 0);
        ENSURE(hpml_graph_alloc(g) == HPML_OK && hpml_tensor_set(x, v, 8) == HPML_OK);
        ENSURE(hpml_graph_forward(g, false, 0) == HPML_OK && hpml_tensor_get(y, back, 8) == HPML_OK);
        for (int i = 0; i < 4; i++) ENSURE(back[i] == v[i]);
        ENSURE(back[4] == (store == 1 ? 1 : v[4]) && back[6] == (store == 2 ? INFINITY : last));
        ENSURE(store == 1 || fabsf(back[5] - v[5]) <= (store == 2 ? 0x1p-25f : 0));
        memcpy(&raw, y->raw, sizeof raw);
        ENSURE(store == 0 || raw == (store == 1 ? 0x3f80 : 0x3c00));
        ENSURE((y->data == NULL) == (store > 0) && sum->data && sum->raw == sum->data); /* no halves read as floats */
        ENSURE(hpml_tensor_set(y, v, 8) == HPML_OK && hpml_tensor_get(y, back, 8) == HPML_OK && back[1] == -2.5f);
        if (store > 0) {
            hpml_graph_desc rows = { .loss = hpml_sum(hpml_mean(y, 1), 0) };
            ENSURE_ERROR(ctx, !hpml_graph_create(ctx, &rows), HPML_ERR_DTYPE, "the loss is");
            ENSURE_ERROR(ctx, hpml_check_grad(g, 0.01f, 1) < 0, HPML_ERR_UNSUPPORTED, "whose rounding hides");
            ENSURE_ERROR(ctx, !hpml_relu(hpml_input(ctx, store == 1 ? HPML_DTYPE_F16 : HPML_DTYPE_BF16, 2, x->shape)),
                         HPML_ERR_DTYPE, store == 1 ? "expected bf16" : "expected f16");
        }
        for (int i = 0; i < 8; i++) h = hpml_linear(h, 256, &(hpml_linear_desc){ .activation = HPML_ACT_GELU });
        hpml_trainer_desc d = { .input = deep, .output = h };
        ENSURE(narrow && hpml_trainer_memory(ctx, &d, &m) == HPML_OK);
        total[store] = m.total - m.products, activations[store] = m.activations;
        ENSURE(total[store] == m.parameters + m.gradients + m.activations + m.scratch + m.optimizer);
        hpml_ctx_free(ctx);
    }
    size_t given = 512 * 256 * 4 + 64; /* the input stays f32, and labels are i32 */
    for (int store = 1; store < 3; store++) {
        ENSURE(activations[store] - given < (activations[0] - given) * 51 / 100);
        ENSURE(total[store] < total[0] * 7 / 8);
    }
    hpml_backend other = *hpml_backend_cpu();
    other.name = "other";
    hpml_ctx *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .activation_dtype = HPML_DTYPE_U8 });
    ENSURE_ERROR(ctx, true, HPML_ERR_ARGUMENT, ".activation_dtype is u8 (4), expected f32, bf16 or f16");
    hpml_ctx_free(ctx);
    ctx = hpml_ctx_create(&(hpml_ctx_desc){ .activation_dtype = HPML_DTYPE_F16, .backend = &other });
    ENSURE_ERROR(ctx, true, HPML_ERR_ARGUMENT, ".activation_dtype f16 is for the CPU; the backend \"other\" takes its");
    hpml_ctx_free(ctx);
}

TEST(wrong_calls_on_graphs_are_errors)
{
    hpml_ctx    *ctx = hpml_ctx_create(NULL);
    hpml_tensor *a = hpml_input_2d(ctx, 4, 1), *b = hpml_input_2d(ctx, 2, 1), *y = hpml_relu(a),
                *z = hpml_sum(b, HPML_ALL_DIMS);
    hpml_tensor *both[2] = { hpml_scale(a, 1, 0), hpml_scale(b, 1, 0) };
    hpml_memory  m;
    ENSURE_ERROR(ctx, !hpml_graph_create(ctx, NULL), HPML_ERR_ARGUMENT, "graph: needs outputs");
    ENSURE_ERROR(ctx, !hpml_graph_create(ctx, &(hpml_graph_desc){ .loss = y }), HPML_ERR_ARGUMENT, "the loss must be");
    ENSURE_ERROR(ctx, !hpml_graph_create(ctx, &(hpml_graph_desc){ .output_count = 2, .outputs = both }),
                 HPML_ERR_SHAPE, "batches of 2 and 4");
    hpml_graph *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .output_count = 1, .outputs = &y });
    hpml_graph_memory(g, &m);
    ENSURE(m.total > 0);
    ENSURE(hpml_graph_alloc(g) == HPML_OK);
    ENSURE_ERROR(ctx, hpml_graph_backward(g, 1, false), HPML_ERR_STATE, "needs a loss");
    hpml_graph *again = hpml_graph_create(ctx, &(hpml_graph_desc){ .output_count = 1, .outputs = &y });
    ENSURE_ERROR(ctx, !again, HPML_ERR_STATE, "belongs to another graph");
    ENSURE(z != NULL);
    hpml_ctx_free(ctx);
}

/* Functions that take an object do nothing without one. */
TEST(a_call_without_an_object_does_nothing)
{
    int64_t           hits[2] = { 1, 1 };
    int               n = 1;
    float             x = 1;
    hpml_packing      none;
    hpml_trainer_desc d = { .lr = 3 };
    memset(&none, 0, sizeof none);
    ENSURE(hpml_node_flops(NULL, false) == 0 && !hpml_graph_ahead(NULL, &n) && !hpml_trainer_hooks(NULL, &n) && n == 0);
    hpml_trainer_hits(NULL, hits);
    ENSURE(hits[0] == 0 && hits[1] == 0);
    hpml_trainer_set_hits(NULL, hits);
    hpml_trainer_desc_resolve(NULL, &d);
    hpml_param_copy(NULL, &x, 0, 1, &x, true);
    hpml_node_give(NULL, NULL, 0, &x);
    ENSURE(hpml_custom_on_host(NULL, NULL, false) == HPML_ERR_ARGUMENT);
    ENSURE(hpml_packing_encode(NULL, &x, NULL, &x, 1, NULL) == HPML_ERR_ARGUMENT);
    ENSURE(hpml_packing_encode(&none, &x, NULL, &x, 1, NULL) == HPML_ERR_ARGUMENT);
    hpml_packing_decode(NULL, &x, &x, 1);
    hpml_packing_decode_add(&none, &x, &x, 1);
    ENSURE(x == 1 && d.lr == 3);
    hpml_rng rng = { .seed = 1 };
    uint32_t word = 7;
    ENSURE(hpml_rng_u32(NULL) == 0 && hpml_rng_uniform(NULL) == 0 && hpml_rng_normal(NULL) == 0);
    ENSURE(hpml_rng_below(NULL, 9) == 0);
    hpml_rng_fill_u32(NULL, &word, 1);
    hpml_rng_fill_u32(&rng, NULL, 1);
    hpml_rng_fill_uniform(NULL, &x, 1);
    hpml_rng_fill_normal(NULL, &x, 1);
    ENSURE(word == 7 && x == 1 && rng.counter == 0);
}

/* The nodes of a planned graph cannot be planned by another graph; hpml_trainer_memory releases its nodes. */
TEST(an_op_is_of_one_graph)
{
    hpml_ctx    *ctx = hpml_ctx_create(NULL);
    hpml_tensor *x = hpml_input_4d(ctx, 2, 1, 6, 6),
                *h = hpml_conv2d(x, 2, &(hpml_conv2d_desc){ .kernel_h = 3, .name = "c" });
    hpml_tensor *y = hpml_linear(hpml_flatten(hpml_scale(hpml_batchnorm(h, NULL), 2, 0)), 3, NULL);
    hpml_trainer_desc d = { .input = x, .output = y, .lr = 0.1f };
    hpml_memory  m;
    const float  v[72] = { 1 };
    ENSURE(hpml_trainer_memory(ctx, &d, &m) == HPML_OK && hpml_trainer_memory(ctx, &d, &m) == HPML_OK);
    hpml_trainer *t = hpml_trainer_create(ctx, &d);
    ENSURE(t);
    ENSURE_ERROR(ctx, !hpml_graph_create(ctx, &(hpml_graph_desc){ .output_count = 1, .outputs = &h }), HPML_ERR_STATE,
                 "\"c\" belongs to another graph already; name");
    ENSURE_ERROR(ctx, !hpml_trainer_create(ctx, &d), HPML_ERR_STATE, "belongs to another graph");
    ENSURE(hpml_trainer_step(t, v, (int32_t[]){ 1, 2 }, 2, NULL) == HPML_OK);
    hpml_ctx_free(ctx);
}

/* Graphs share the memory of an input; in each pass the input has the batch of the graph that runs. */
TEST(graphs_share_an_input)
{
    hpml_ctx    *ctx = hpml_ctx_create(NULL);
    hpml_tensor *x = hpml_input_2d(ctx, 4, 2), *y = hpml_scale(x, 2, 0), *z = hpml_scale(x, 3, 0);
    hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .output_count = 1, .outputs = &y });
    hpml_graph  *h = hpml_graph_create(ctx, &(hpml_graph_desc){ .output_count = 1, .outputs = &z });
    const float  v[8] = { 1, 2, 3, 4, 5, 6, 7, 8 };
    ENSURE(hpml_graph_alloc(g) == HPML_OK && hpml_tensor_set(x, v, 8) == HPML_OK);
    ENSURE(hpml_graph_forward(h, false, 0) == HPML_OK && z->data[7] == 24);
    ENSURE(hpml_graph_set_batch(g, 1) == HPML_OK && hpml_graph_forward(g, false, 0) == HPML_OK &&
           hpml_tensor_count(x) == 2);
    ENSURE(hpml_tensor_set(x, (float[]){ -1, -2 }, 2) == HPML_OK);
    ENSURE(hpml_graph_forward(h, false, 0) == HPML_OK && hpml_tensor_count(x) == 8 &&
           z->data[1] == -6 && z->data[7] == 24);
    hpml_ctx_free(ctx);
}

/* An input may be an output of a graph, and has memory even if no op reads it. */
TEST(inputs_as_outputs)
{
    hpml_ctx    *ctx = hpml_ctx_create(NULL);
    hpml_tensor *x = hpml_input_2d(ctx, 4, 2),
                *p = hpml_param_create(ctx, &(hpml_param_desc){ .ndim = 1, .shape = { 3 } });
    hpml_tensor *out[3] = { x, p, hpml_reshape_2d(x, 2, 4) };
    hpml_tensor *alone = hpml_input_2d(ctx, 4, 2);
    float        v[8] = { 1, 2, 3, 4, 5, 6, 7, 8 };
    hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .output_count = 3, .outputs = out });
    hpml_graph  *h = hpml_graph_create(ctx, &(hpml_graph_desc){ .output_count = 1, .outputs = &alone });
    ENSURE(hpml_graph_forward(g, false, 0) == HPML_OK && hpml_tensor_set(x, v, 8) == HPML_OK && p->data);
    ENSURE(hpml_graph_forward(g, false, 0) == HPML_OK && out[2]->data[7] == 8);
    ENSURE(hpml_graph_forward(h, false, 0) == HPML_OK && hpml_tensor_get(alone, v, 8) == HPML_OK && v[7] == 0);
    hpml_ctx_free(ctx);
}

/* Lifetimes of kind 0: from time 0; 1: nested, as in training; 2: short, as in evaluation; 3: random. */
static void lives(private_slot *s, int n, int kind, int sizes, hpml_rng *rng)
{
    for (int i = 0; i < n; i++) {
        int a = (int)hpml_rng_below(rng, 2 * n), b = (int)hpml_rng_below(rng, 2 * n);
        s[i].bytes = 64 * (size_t)(1 + hpml_rng_below(rng, sizes));
        s[i].from  = kind == 0 ? 0 : kind == 3 ? (a < b ? a : b) : i;
        s[i].to    = kind == 1 ? 2 * n - 1 - i : kind == 3 ? (a < b ? b : a) : i + 1 + (i % 7 == 0);
    }
}

static bool meet(const private_slot *a, const private_slot *b) { return a->to >= b->from && b->to >= a->from; }

/* Returns the lowest offset at which s[i] overlaps none of the arrays before it that are alive at the same time. */
static size_t first_fit(const private_slot *s, int i)
{
    size_t at = 0, before;
    do {
        before = at;
        for (int j = 0; j < i; j++)
            if (meet(&s[i], &s[j]) && at < s[j].offset + s[j].bytes && s[j].offset < at + s[i].bytes)
                at = s[j].offset + s[j].bytes;
    } while (at != before);
    return at;
}

TEST(arrays_are_placed_by_first_fit_and_do_not_overlap_while_alive)
{
    enum { MOST = 300 };
    hpml_ctx *ctx = hpml_ctx_create(NULL);
    hpml_rng  rng = { 5, 0, 0 };
    for (int round = 0; round < 200; round++) {
        private_slot s[MOST];
        int          n = 1 + (int)hpml_rng_below(&rng, MOST);
        lives(s, n, round % 4, 1 + round / 4, &rng);
        ENSURE(private_offsets(ctx, s, n));
        for (int i = 0; i < n; i++) ENSURE(s[i].offset == first_fit(s, i));
    }
    hpml_ctx_free(ctx);
}

/* Each allocation of the tree fails in turn: each time an error, and all memory is freed. */
TEST(placement_survives_failing_allocations)
{
    private_slot slots[200];
    hpml_rng    rng = { 6, 0, 0 };
    lives(slots, 200, 1, 9, &rng);
    for (size_t k = 1;; k++) {
        meter         m    = { .fail_at = 0 };
        hpml_ctx_desc cd   = { .threads = 1, .allocator = { meter_alloc, meter_free, &m } };
        hpml_ctx     *ctx  = hpml_ctx_create(&cd);
        size_t        held = m.live;
        m.fail_at = m.calls + k;
        bool done = private_offsets(ctx, slots, 200), failed = m.calls >= m.fail_at;
        ENSURE(done == !failed && (hpml_ctx_status(ctx) == HPML_ERR_MEMORY) == failed && m.live == held);
        hpml_ctx_free(ctx);
        ENSURE(m.live == 0);
        if (done) break;
    }
}

/* Returns the CPU seconds, the least of three runs, to record and plan a model of n parts. kind 0: ops on one number;
   1: layers with parameters, which are then found by name; 2: inputs that are added up. Negative: an error. */
static double time_of_model(int kind, int n)
{
    double least = -1;
    for (int round = 0; round < 3; round++) {
        hpml_ctx_desc   cd    = { .threads = 1 };
        clock_t         start = clock();
        hpml_ctx       *ctx   = hpml_ctx_create(&cd);
        hpml_tensor    *x     = hpml_input_2d(ctx, 1, kind == 1 ? 4 : 1), *found = x;
        hpml_graph_desc d     = { .output_count = 1, .outputs = &x };
        for (int i = 0; i < n; i++)
            x = kind == 0 ? hpml_relu(x) : kind == 1 ? hpml_linear(x, 4, NULL) : hpml_add(x, hpml_input_2d(ctx, 1, 1));
        if (kind == 1) d.loss = hpml_mean(x, HPML_ALL_DIMS);
        hpml_graph *g = hpml_graph_create(ctx, &d);
        for (int i = 0; i < hpml_param_count(ctx) && found; i++)
            found = hpml_param_find(ctx, hpml_param_at(ctx, i)->name) == hpml_param_at(ctx, i) ? found : NULL;
        hpml_ctx_free(ctx);
        double took = (double)(clock() - start) / CLOCKS_PER_SEC;
        if (!g || !found) return -1;
        if (least < 0 || took < least) least = took;
    }
    return least;
}

TEST_PLAIN(planning_time_is_linear_in_model_size)
{
    static const int n[] = { 20000, 3000, 10000 };
    for (int kind = 0; kind < 3; kind++) {
        double once = 0, four = 0;
        for (int attempt = 0; attempt < 5 && (attempt == 0 || four >= 8 * once); attempt++) {
            once = time_of_model(kind, n[kind] / (SLOW_BUILD ? 4 : 1));
            four = time_of_model(kind, n[kind] * 4 / (SLOW_BUILD ? 4 : 1));
            ENSURE(once > 0 && four > 0);
        }
        if (four >= 8 * once) printf("    kind %d: %.4f s, four times as large %.4f s\n", kind, once, four);
        ENSURE(four < 8 * once);
    }
}

/* A layer whose recording fails leaves no parameter: after hpml_ctx_clear_error its name may be used again. */
TEST(a_layer_that_fails_leaves_no_parameter)
{
    hpml_ctx    *ctx = hpml_ctx_create(NULL);
    hpml_tensor *tokens = hpml_input_tokens(ctx, 4, 8), *x = hpml_input_2d(ctx, 4, 8),
                *a = hpml_linear(x, 8, &(hpml_linear_desc){ .name = "a" });
    hpml_linear_desc d = { .name = "b", .weight = hpml_param_find(ctx, "a.weight") };
    char         name[250] = "";
    ENSURE(a && hpml_param_create(ctx, &(hpml_param_desc){ .ndim = 1, .shape = { 3 }, .name = "p" }));
    ENSURE_ERROR(ctx, !hpml_linear(x, 5, &d), HPML_ERR_SHAPE, "expected 5x8");
    ENSURE_ERROR(ctx, !hpml_linear(tokens, 5, &(hpml_linear_desc){ .name = "c" }), HPML_ERR_DTYPE, "expected f32");
    ENSURE_ERROR(ctx, !hpml_lstm(x, 5, "c"), HPML_ERR_SHAPE, "lstm");
    memset(name, 'n', sizeof name - 1);
    ENSURE_ERROR(ctx, !hpml_param_create(ctx, &(hpml_param_desc){ .ndim = 1, .shape = { 3 }, .name = name }),
                 HPML_ERR_ARGUMENT, "249 characters");
    ENSURE_ERROR(ctx, !hpml_linear(x, 5, &(hpml_linear_desc){ .name = name }), HPML_ERR_ARGUMENT, "255 characters");
    ENSURE(hpml_param_count(ctx) == 3 && hpml_linear(x, 8, &d) &&
           hpml_linear(x, 5, &(hpml_linear_desc){ .name = "c" }));
    ENSURE(hpml_param_count(ctx) == 6 && hpml_param_total(ctx) == 64 + 8 + 3 + 8 + 40 + 5);
    hpml_ctx_free(ctx);
}

/* Conversions between all types from and to odd addresses, because arrays in files are not aligned. */
TEST(conversions_of_unaligned_arrays)
{
    float   plain[1030], there[1030];
    uint8_t x[4 * 1030 + 1], y[4 * 1030 + 1];
    for (int i = 0; i < 1030; i++) plain[i] = (float)(i * 7 % 250);
    for (int n = 0; n < ISAS; n++) {
        hpml_ctx *ctx = context(isas[n], 1);
        for (int types = 0; ctx && types < 25; types++) {
            hpml_dtype from = (hpml_dtype)(types % 5), to = (hpml_dtype)(types / 5);
            ENSURE(hpml_convert(ctx, from, x + 1, HPML_DTYPE_F32, plain, 1030) == HPML_OK);
            ENSURE(hpml_convert(ctx, to, y + 1, from, x + 1, 1030) == HPML_OK);
            ENSURE(hpml_convert(ctx, HPML_DTYPE_F32, there, to, y + 1, 1030) == HPML_OK);
            ENSURE(memcmp(there, plain, sizeof plain) == 0);
        }
        hpml_ctx_free(ctx);
    }
}

/* Conversions to integers, on every set of kernels: rounded to nearest, ties to even, saturated to the type's range. */
TEST(integers_saturate_on_all_kernels)
{
    const float   x[20] = { 0.5f, 1.5f, 2.5f, -0.5f, -3.5f, 255, 256, 1e9f, 3e9f, -3e9f, NAN, 254.6f, INFINITY,
                            -INFINITY, 7, 8, 9, 10, 11, -12 };
    const int32_t i32[20] = { 0, 2, 2, 0, -4, 255, 256, 1000000000, INT32_MAX, INT32_MIN, 0, 255, INT32_MAX,
                              INT32_MIN, 7, 8, 9, 10, 11, -12 };
    for (int n = 0; n < ISAS; n++) {
        hpml_ctx *ctx = context(isas[n], 0);
        int32_t   y[20];
        uint8_t   b[20];
        float     back[20];
        if (!ctx) continue;
        ENSURE(hpml_convert(ctx, HPML_DTYPE_I32, y, HPML_DTYPE_F32, x, 20) == HPML_OK);
        ENSURE(memcmp(y, i32, sizeof y) == 0);
        for (int whole = 0; whole < 2; whole++) {
            ENSURE(hpml_convert(ctx, HPML_DTYPE_U8, b, whole ? HPML_DTYPE_I32 : HPML_DTYPE_F32,
                                whole ? (const void *)i32 : x, 20) == HPML_OK);
            for (int i = 0; i < 20; i++) ENSURE(b[i] == (i32[i] < 0 ? 0 : i32[i] > 255 ? 255 : i32[i]));
        }
        ENSURE(hpml_convert(ctx, HPML_DTYPE_F32, back, HPML_DTYPE_U8, b, 20) == HPML_OK);
        for (int i = 0; i < 20; i++) ENSURE(back[i] == (float)b[i]);
        hpml_ctx_free(ctx);
    }
}

static void add_task(void *arg, int64_t task, int thread)
{
    (void)thread;
    ((int64_t *)arg)[task]++;
}

TEST(each_task_runs_once)
{
    static int64_t count[5000];
    hpml_ctx      *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 4 });
    for (int round = 1; round <= 300; round++) private_parallel(ctx, round % 3 ? round * 16 : 5000, add_task, count);
    for (int i = 0; i < 5000; i++) { /* 100 rounds count every task, the others only their first ones */
        int64_t want = 100;
        for (int round = 1; round <= 300; round++) want += round % 3 && i < round * 16;
        ENSURE(count[i] == want);
    }
    hpml_ctx_free(ctx);
}

#ifdef __linux__
/* Returns the number of threads of this process that may use fewer cores than the caller. */
static int confined(void)
{
    unsigned long  all[16] = { 0 }, cores[16];
    int            count = 0;
    DIR           *dir = opendir("/proc/self/task");
    struct dirent *e;
    syscall(SYS_sched_getaffinity, 0L, sizeof all, all);
    while (dir && (e = readdir(dir)) != NULL) {
        long id = atol(e->d_name);
        memset(cores, 0, sizeof cores);
        if (id > 0 && syscall(SYS_sched_getaffinity, id, sizeof cores, cores) > 0)
            count += memcmp(cores, all, sizeof all) != 0;
    }
    if (dir) closedir(dir);
    return count;
}

/* Workers are woken off the caller's core and may use all cores again when they are awake, even if the job has ended by
   then. */
TEST(workers_may_use_all_cores_once_awake)
{
    static int64_t count[5000];
    hpml_ctx      *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 4 });
    for (int round = 0; round < 10; round++) {
        usleep(30000); /* long enough to fall asleep */
        private_parallel(ctx, round % 2 ? 5000 : 2, add_task, count);
        for (int look = 0; look < 100 && confined() > 0; look++) usleep(10000);
        ENSURE(confined() == 0);
    }
    hpml_ctx_free(ctx);
}
#endif

/* Views of views: reading and writing through them, and copying them to another dtype. */
TEST(views_of_views)
{
    hpml_ctx    *ctx = hpml_ctx_create(NULL);
    hpml_tensor *t = hpml_tensor_create_3d(ctx, 4, 3, 5), *m = hpml_tensor_create_3d(ctx, 3, 2, 3);
    hpml_tensor *half = hpml_tensor_create(ctx, HPML_DTYPE_F16, 3, m->shape);
    for (int i = 0; i < 60; i++) t->data[i] = (float)i;
    hpml_tensor *a = hpml_view_slice(hpml_view_transpose(t, 0, 2), 0, 1, 3);       /* (3, 3, 4) */
    hpml_tensor *b = hpml_view_slice(hpml_view_transpose(a, 1, 2), 1, 2, 2);       /* (3, 2, 3) */
    ENSURE(hpml_tensor_copy(half, b) == HPML_OK && hpml_tensor_copy(m, half) == HPML_OK);
    for (int i = 0; i < 18; i++) ENSURE(m->data[i] == (float)((i / 3 % 2 + 2) * 15 + i % 3 * 5 + i / 6 + 1));
    hpml_tensor *flat = hpml_view_reshape(hpml_view_slice(t, 0, 1, 2), 2, (int64_t[]){ -1, 5 }); /* (6, 5) */
    hpml_tensor *last = hpml_view_slice(hpml_view_reshape(t, 2, (int64_t[]){ 12, 5 }), 0, 11, 1);
    hpml_tensor *x = hpml_input_2d(ctx, 6, 5), *y = hpml_mul(hpml_add(x, flat), last);
    hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .output_count = 1, .outputs = &y });
    ENSURE(hpml_graph_forward(g, false, 0) == HPML_OK && y->data[0] == 15 * 55 && y->data[29] == 44 * 59);
    ENSURE_ERROR(ctx, !hpml_view_reshape(hpml_view_slice(flat, 1, 2, 1), 1, (int64_t[]){ 6 }),
                 HPML_ERR_SHAPE, "reshape of");
    hpml_ctx_free(ctx);
}

TEST(views_share_memory)
{
    hpml_ctx    *ctx = hpml_ctx_create(NULL);
    hpml_tensor *t   = hpml_tensor_create_3d(ctx, 2, 3, 4), *v, *copy = hpml_tensor_create_3d(ctx, 4, 2, 3);
    for (int i = 0; i < 24; i++) t->data[i] = (float)i;
    v = hpml_view_transpose(hpml_view_transpose(t, 1, 2), 0, 1); /* (4, 2, 3) */
    ENSURE(hpml_tensor_copy(copy, v) == HPML_OK);
    for (int a = 0; a < 4; a++)
        for (int b = 0; b < 2; b++)
            for (int c = 0; c < 3; c++) ENSURE(copy->data[(a * 2 + b) * 3 + c] == (float)(b * 12 + c * 4 + a));
    v = hpml_view_slice(hpml_view_reshape(t, 2, (int64_t[]){ 6, -1 }), 0, 4, 2);
    ENSURE(v->data == t->data + 16 && v->shape[0] == 2 && v->shape[1] == 4);
    ENSURE(hpml_view_slice(t, 0, 1, 2) == NULL && hpml_ctx_status(ctx) == HPML_ERR_SHAPE);
    hpml_ctx_free(ctx);
}

/* All 65,536 halves to float and back, with every set of kernels; the scalar rounding against all near ties. */
TEST(halves_round_trip_on_all_kernels)
{
    static uint16_t h[65536], back[65536];
    static float    f[65536], reference[65536];
    for (int i = 0; i < 65536; i++) h[i] = (uint16_t)i;
    for (int n = 0; n < ISAS; n++) {
        hpml_ctx *ctx = context(isas[n], 0);
        if (!ctx) continue;
        hpml_convert(ctx, HPML_DTYPE_F32, f, HPML_DTYPE_F16, h, 65536);
        hpml_convert(ctx, HPML_DTYPE_F16, back, HPML_DTYPE_F32, f, 65536);
        if (n == 0) memcpy(reference, f, sizeof f);
        for (int i = 0; i < 65536; i++) {
            ENSURE(f[i] != f[i] ? (back[i] & 0x7c00) == 0x7c00 && (back[i] & 0x3ff) : back[i] == h[i]);
            ENSURE(memcmp(&f[i], &reference[i], 4) == 0 || f[i] != f[i]);
        }
        hpml_convert(ctx, HPML_DTYPE_F32, f, HPML_DTYPE_BF16, h, 65536);
        hpml_convert(ctx, HPML_DTYPE_BF16, back, HPML_DTYPE_F32, f, 65536);
        for (int i = 0; i < 65536; i++) ENSURE(f[i] != f[i] ? (back[i] & 0x7f) != 0 : back[i] == h[i]);
        f[0] = 65519.0f, f[1] = 65520.0f, f[2] = 1.0f + 1.0f / 2048;
        f[3] = 1.0f + 3.0f / 2048, f[4] = 2.98e-8f, f[5] = 2.99e-8f;
        hpml_convert(ctx, HPML_DTYPE_F16, back, HPML_DTYPE_F32, f, 6);
        ENSURE(back[0] == 0x7bff && back[1] == 0x7c00 && back[2] == 0x3c00 && back[3] == 0x3c02 &&
               back[4] == 0 && back[5] == 1);
        hpml_ctx_free(ctx);
    }
}

TEST(functions_against_libm_on_all_kernels)
{
    static float x[20011], y[20011];
    for (int n = 0; n < ISAS; n++) {
        const void *k = private_kernels(isas[n]);
        if (!k) continue;
        for (int i = 0; i < 20011; i++) x[i] = ((float)i - 10005) / 100;
        private_activation(k, HPML_ACT_EXP, y, x, 20011);
        for (int i = 0; i < 20011; i++) {
            double e = exp((double)x[i]);
            if (e > 3.4e38) ENSURE(isinf(y[i]));
            else ENSURE_NEAR(y[i], e, 3e-7 * e + 1e-37);
        }
        private_activation(k, HPML_ACT_TANH, y, x, 20011);
        for (int i = 0; i < 20011; i++) ENSURE_NEAR(y[i], tanh((double)x[i]), 3e-7);
        private_activation(k, HPML_ACT_SIGMOID, y, x, 20011);
        for (int i = 0; i < 20011; i++) ENSURE_NEAR(y[i], 1 / (1 + exp(-(double)x[i])), 3e-7);
        private_activation(k, HPML_ACT_GELU_ERF, y, x, 20011);
        for (int i = 0; i < 20011; i++) {
            double z = (double)x[i] / sqrt(2.0);
            ENSURE_NEAR(y[i], (double)x[i] / 2 * (1 + erf(z)), 5e-7 * fabs((double)x[i]) / 2 + 1e-9);
        }
        for (int i = 0; i < 20011; i++) x[i] = expf(((float)i - 10005) / 120);
        private_activation(k, HPML_ACT_LOG, y, x, 20011);
        for (int i = 0; i < 20011; i++) ENSURE_NEAR(y[i], log((double)x[i]), 3e-7 * fabs(log((double)x[i])) + 2e-7);
        x[0] = NAN, x[1] = INFINITY, x[2] = -INFINITY, x[3] = 0;
        private_activation(k, HPML_ACT_EXP, y, x, 4);
        ENSURE(isnan(y[0]) && isinf(y[1]) && y[2] == 0 && y[3] == 1);
        private_activation(k, HPML_ACT_LOG, y, x, 4);
        ENSURE(isnan(y[0]) && isinf(y[1]) && isnan(y[2]) && y[3] == -INFINITY);
    }
}

TEST(schedules_and_rules)
{
    hpml_schedule s = { .kind = HPML_SCHEDULE_COSINE, .warmup_steps = 10, .total_steps = 110, .min_lr = 0.1f };
    ENSURE_NEAR(hpml_schedule_lr(&s, 1, 0), 0.1, 1e-6);
    ENSURE_NEAR(hpml_schedule_lr(&s, 1, 9), 1.0, 1e-6);
    ENSURE_NEAR(hpml_schedule_lr(&s, 1, 60), 0.55, 1e-6);
    ENSURE_NEAR(hpml_schedule_lr(&s, 1, 500), 0.1, 1e-6);
    s = (hpml_schedule){ .kind = HPML_SCHEDULE_STEP, .period = 30 };
    ENSURE_NEAR(hpml_schedule_lr(&s, 1, 65), 0.01, 1e-6);
    s = (hpml_schedule){ .kind = HPML_SCHEDULE_LINEAR, .total_steps = 100 };
    ENSURE_NEAR(hpml_schedule_lr(&s, 2, 25), 1.5, 1e-6);
    ENSURE_NEAR(hpml_lr_scale(HPML_LR_LINEAR, 0.1f, 8), 0.8, 1e-6);
    ENSURE_NEAR(hpml_lr_scale(HPML_LR_SQRT, 0.1f, 4), 0.2, 1e-6);
}

/* Records y = a + b; plain: as a - (-b), whose gradients the planner does not put in the memory of dy. */
static hpml_tensor *sum_of(hpml_tensor *a, hpml_tensor *b, bool plain)
{
    return plain ? hpml_sub(a, hpml_scale(b, -1, 0)) : hpml_add(a, b);
}

/* Records a random graph of 14 ops, most of them sums; writes the gradients of its parameters, one after another, to
   `grads`, and returns their number. *memory: of the activations. */
static int64_t random_sums(uint64_t seed, bool plain, bool halves, float *grads, size_t *memory)
{
    hpml_rng     rng = { .seed = seed };
    hpml_ctx    *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1, .seed = 5 });
    hpml_tensor *x = hpml_input_2d(ctx, 4, 6), *t[16] = { hpml_linear(x, 6, NULL) }, *unused;
    hpml_memory  m;
    int64_t      n = 0;
    for (int k = 1; k < 15; k++) {
        hpml_tensor *a = t[hpml_rng_below(&rng, k)], *b = t[k - 1];
        switch (hpml_rng_below(&rng, 7)) {
        case 0: t[k] = hpml_linear(b, 6, NULL); break;
        case 1: t[k] = hpml_linear(b, 6, &(hpml_linear_desc){ .activation = HPML_ACT_GELU }); break;
        case 2: t[k] = hpml_reshape(hpml_tanh(hpml_reshape(b, 1, (int64_t[]){ 24 })), 2, (int64_t[]){ 4, 6 }); break;
        case 3: t[k] = sum_of(a, hpml_linear(hpml_layernorm(a, NULL), 6, NULL), plain); break;
        case 4: t[k] = sum_of(b, a, plain); break;
        default: t[k] = sum_of(a, b, plain);
        }
    }
    unused = sum_of(t[3], t[2], plain);
    hpml_tensor *loss = hpml_mean(hpml_mul(t[14], t[14]), HPML_ALL_DIMS);
    hpml_graph  *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .loss = loss, .output_count = 1, .outputs = &unused });
    if (halves) hpml_graph_halves(g);
    hpml_graph_memory(g, &m);
    *memory = m.activations;
    if (hpml_graph_alloc(g) != HPML_OK) return 0;
    for (int i = 0; i < 24; i++) x->data[i] = hpml_rng_uniform(&rng) - 0.5f;
    hpml_graph_forward(g, true, 0);
    hpml_graph_backward_half(g, halves ? HPML_HALF_INPUTS : HPML_HALF_BOTH, 1, false);
    if (halves) hpml_graph_backward_half(g, HPML_HALF_WEIGHTS, 1, false);
    for (int i = 0; i < hpml_param_count(ctx); i++) {
        const hpml_tensor *p = hpml_param_at(ctx, i);
        for (int64_t j = 0; p->grad && j < hpml_tensor_count(p); j++) grads[n++] = p->grad[j];
    }
    n = hpml_ctx_status(ctx) == HPML_OK ? n : 0;
    hpml_ctx_free(ctx);
    return n;
}

TEST(gradients_of_sums_share_memory)
{
    static float grads[2][8192];
    size_t       memory[2], saved = 0;
    for (uint64_t seed = 0; seed < 300; seed++)
        for (int halves = 0; halves < 2; halves++) {
            int64_t n = random_sums(seed, false, halves, grads[0], &memory[0]);
            ENSURE(n > 0 && n == random_sums(seed, true, halves, grads[1], &memory[1]));
            for (int64_t i = 0; i < n; i++) ENSURE(grads[0][i] == grads[1][i]);
            saved += memory[1] - memory[0];
        }
    ENSURE(saved > 0);
}

/* Returns the largest error of the gradients of a + b, where b is a linear layer, recorded first or last, and a has an
   activation, whose backward pass overwrites the gradient of its result. */
static double sum_error(bool b_first, bool deep)
{
    hpml_ctx    *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 3 });
    hpml_tensor *x = hpml_input_2d(ctx, 8, 6), *a = x, *b = b_first ? hpml_linear(x, 5, NULL) : NULL;
    if (deep) a = hpml_linear(a, 7, &(hpml_linear_desc){ .activation = HPML_ACT_GELU });
    a = hpml_linear(a, 5, &(hpml_linear_desc){ .activation = HPML_ACT_TANH });
    if (!b) b = hpml_linear(x, 5, NULL);
    hpml_tensor *target = hpml_input_2d(ctx, 8, 3);
    hpml_graph  *g      = hpml_graph_create(ctx, &(hpml_graph_desc){
        .loss = hpml_mse(hpml_linear(hpml_add(a, b), 3, NULL), target) });
    hpml_graph_alloc(g);
    for (int i = 0; i < 48; i++) x->data[i] = (float)(i * 37 % 23 - 11) / 11;
    double error = hpml_check_grad(g, 0, 50);
    hpml_ctx_free(ctx);
    return error;
}

TEST(the_gradient_of_a_sum_is_read_before_it_is_overwritten)
{
    for (int i = 0; i < 4; i++) {
        double error = sum_error(i & 1, i >> 1);
        ENSURE(error >= 0 && error < 1e-3);
    }
}

/* A product too large for the memory that is left is an error; smaller ones go on in the memory that they have. */
TEST(products_that_fit_go_on_after_one_that_did_not)
{
    enum { SMALL = 8, LARGE = 600 };
    meter         m   = { .fail_at = 0 };
    hpml_ctx     *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1, .allocator = { meter_alloc, meter_free, &m } });
    hpml_tensor  *x = hpml_input_2d(ctx, SMALL, SMALL), *y = hpml_linear(x, SMALL, NULL);
    hpml_graph   *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .output_count = 1, .outputs = &y });
    static float  a[LARGE * LARGE], c[LARGE * LARGE];
    float         before[SMALL * SMALL], after[SMALL * SMALL];
    ENSURE(hpml_graph_alloc(g) == HPML_OK);
    for (int i = 0; i < SMALL * SMALL; i++) x->data[i] = (float)(i % 7);
    ENSURE(hpml_graph_forward(g, false, 0) == HPML_OK);
    hpml_tensor_get(y, before, SMALL * SMALL);
    m.fail_at = m.calls + 1;
    ENSURE(hpml_sgemm(ctx, false, false, LARGE, LARGE, LARGE, 1, a, LARGE, a, LARGE, 0, c, LARGE) == HPML_ERR_MEMORY);
    hpml_ctx_clear_error(ctx);
    size_t calls = m.calls;
    for (int i = 0; i < SMALL * SMALL; i++) x->data[i] *= 2;
    ENSURE(hpml_graph_forward(g, false, 0) == HPML_OK && hpml_ctx_status(ctx) == HPML_OK && m.calls == calls);
    hpml_tensor_get(y, after, SMALL * SMALL);
    for (int i = 0; i < SMALL * SMALL; i++) ENSURE_NEAR(after[i], 2 * before[i], 1e-5);
    hpml_ctx_free(ctx);
    ENSURE(m.live == 0);
}

/* In a chain of residual blocks x = x + f(x) no sum's gradients take memory of their own. */
TEST(the_gradients_of_a_residual_stream_are_one_array)
{
    hpml_ctx    *ctx = hpml_ctx_create(NULL);
    hpml_tensor *x = hpml_linear(hpml_input_2d(ctx, 4, 8), 8, NULL), *sum[4], *branch[4];
    for (int i = 0; i < 4; i++) {
        hpml_tensor *h = hpml_linear(hpml_layernorm(x, NULL), 32, &(hpml_linear_desc){ .activation = HPML_ACT_GELU });
        branch[i] = hpml_linear(h, 8, NULL);
        sum[i]    = x = hpml_add(x, branch[i]);
    }
    hpml_graph *g = hpml_graph_create(ctx, &(hpml_graph_desc){ .loss = hpml_mean(x, HPML_ALL_DIMS) });
    ENSURE(hpml_graph_alloc(g) == HPML_OK && sum[0]->raw_grad);
    for (int i = 0; i < 4; i++) ENSURE(sum[i]->raw_grad == sum[0]->raw_grad && branch[i]->raw_grad == sum[0]->raw_grad);
    hpml_ctx_free(ctx);
}
