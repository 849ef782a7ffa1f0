/* Who does what where: roles by name, tensors dealt to servers, towers in one graph, parameters that ranks share,
   worlds of ranks in one process. */
#include "../hpml_comm.h"
#include "test.h"

TEST(roles_of_a_cluster)
{
    const char   text[] = "worker=a:2222,b:2222,c:2223; ps=d:2222,e:2222";
    const char  *role[] = { "worker", "worker", "worker", "ps", "ps" };
    const char  *host[] = { "a:2222", "b:2222", "c:2223", "d:2222", "e:2222" };
    hpml_cluster c;
    char         why[200], address[16];
    ENSURE(hpml_cluster_parse(text, &c, why, sizeof why) == HPML_OK && c.workers == 3 && c.servers == 2);
    for (int rank = 0; rank < 5; rank++) {
        int task = -1;
        ENSURE(strcmp(hpml_cluster_role(&c, rank, &task), role[rank]) == 0 && task == rank % 3);
        ENSURE(hpml_cluster_rank(&c, role[rank], task) == rank);
        ENSURE(hpml_cluster_address(&c, rank, address, sizeof address) == 6 && strcmp(address, host[rank]) == 0);
    }
    ENSURE(!hpml_cluster_role(&c, 5, NULL) && !hpml_cluster_role(&c, -1, NULL) && !hpml_cluster_role(NULL, 0, NULL));
    ENSURE(hpml_cluster_rank(&c, "ps", 2) == -1 && hpml_cluster_rank(&c, "chief", 0) == -1);
    ENSURE(hpml_cluster_address(&c, 5, address, sizeof address) == 0 && address[0] == 0);
    ENSURE(hpml_cluster_parse("worker=a", &c, NULL, 0) == HPML_OK && c.workers == 1 && c.servers == 0);
}

TEST(wrong_clusters_are_errors_that_name_the_word)
{
    static const struct { const char *text, *word; } wrong[] = {
        { "chief=a worker=b", "\"chief\" is no role" }, { "worker=a worker=b", "\"worker\" is there twice" },
        { "worker=a,,b", "\"worker=a,,b\" has a task without a name" }, { "worker=", "\"worker=\" has a task" },
        { "worker=a,", "\"worker=a,\" has a task" }, { "worker", "\"worker\" has a task" },
        { "worker=a ps=", "\"ps=\" has a task" }, { "ps=a", "there is no worker" }, { "", "there is no worker" },
        { NULL, "no text" } };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        hpml_cluster c = { 7, 7, { "", "" } };
        char         why[200] = "";
        ENSURE(hpml_cluster_parse(wrong[i].text, &c, why, sizeof why) == HPML_ERR_ARGUMENT);
        if (!strstr(why, wrong[i].word)) printf("    %s\n", why);
        ENSURE(strstr(why, wrong[i].word) && (!wrong[i].text || (c.workers == 0 && c.servers == 0)));
    }
}

/* Two linear layers over three servers, as in TensorFlow's manual of replica_device_setter. */
TEST(tensors_are_dealt_to_servers_in_turn)
{
    const hpml_gradient t[] = { { "weights_1", NULL, 784, 100 }, { "biases_1", NULL, 1, 100 },
                                { "weights_2", NULL, 100, 10 }, { "biases_2", NULL, 1, 10 } };
    int32_t server[4];
    int64_t floats[3];
    hpml_place_round_robin(t, 4, 3, server, floats);
    ENSURE(server[0] == 0 && server[1] == 1 && server[2] == 2 && server[3] == 0);
    ENSURE(floats[0] == 78410 && floats[1] == 100 && floats[2] == 1000);
}

enum { BATCH = 8, INPUTS = 6, STEPS = 12, RANKS = 4 };

/* The samples of step `step`, rank after rank. */
static void samples(int step, int count, float *x, int32_t *y)
{
    hpml_rng r = { .seed = (uint64_t)step };
    hpml_rng_fill_normal(&r, x, (int64_t)count * INPUTS);
    for (int i = 0; i < count; i++) y[i] = x[i * INPUTS] > 0 ? x[i * INPUTS + 1] > 0 : 2;
}

static hpml_tensor *linear(hpml_tensor *x, int64_t out, const char *name)
{
    return hpml_linear(x, out, &(hpml_linear_desc){ .name = name });
}

/* ---- one graph with a tower for each part of the batch, against a model on each rank */

typedef struct gradients { float tower[512], rank[512]; int64_t count; int nodes[2]; } gradients;

static int nodes_of(const hpml_graph *g)
{
    hpml_profile_enable((hpml_graph *)(uintptr_t)g, true);
    return hpml_profile(g, NULL, 0);
}

static hpml_status rank_gradient(hpml_comm *c, void *user)
{
    hpml_ctx     *ctx = hpml_comm_ctx(c);
    gradients    *out = (gradients *)user;
    float         x[2 * BATCH * INPUTS];
    int32_t       y[2 * BATCH];
    hpml_tensor  *in = hpml_input_2d(ctx, BATCH, INPUTS);
    hpml_trainer *t  = hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = in, .output = linear(hpml_tanh(linear(in, 5, "a")), 3, "b"), .lr = 1 });
    if (!hpml_distribute(t, c, NULL)) return hpml_ctx_status(ctx);
    samples(0, 2 * BATCH, x, y);
    int rank = hpml_comm_rank(c);
    hpml_trainer_step(t, x + rank * BATCH * INPUTS, y + rank * BATCH, BATCH, NULL);
    if (rank > 0) return hpml_ctx_status(ctx);
    const float *g = hpml_trainer_array(t, HPML_ARRAY_GRADIENTS, &out->count);
    if (g) memcpy(out->rank, g, sizeof(float) * (size_t)out->count);
    out->nodes[0] = nodes_of(hpml_trainer_graph(t));
    return hpml_ctx_status(ctx);
}

/* Records the model again on `part` of the batch, with the parameters of tower `first`. */
static hpml_tensor *tower(hpml_ctx *ctx, hpml_tensor *part, bool first)
{
    if (first) return linear(hpml_tanh(linear(part, 5, "a")), 3, "b");
    hpml_tensor *w[] = { hpml_param_find(ctx, "a.weight"), hpml_param_find(ctx, "a.bias"),
                         hpml_param_find(ctx, "b.weight"), hpml_param_find(ctx, "b.bias") };
    hpml_tensor *h = hpml_tanh(hpml_add(hpml_matmul(part, w[0], false, true), w[1]));
    return hpml_add(hpml_matmul(h, w[2], false, true), w[3]);
}

TEST(towers_in_one_graph_have_the_gradient_of_as_many_ranks)
{
    gradients       out = { { 0 }, { 0 }, 0, { 0 } };
    float           x[2 * BATCH * INPUTS];
    int32_t         y[2 * BATCH];
    char            why[300] = "";
    hpml_launch_desc two = { .run = "threads:2" };
    ENSURE(hpml_launch(&two, rank_gradient, &out, why, sizeof why) == HPML_OK);
    hpml_ctx    *ctx = hpml_ctx_create(NULL);
    hpml_tensor *in  = hpml_input_2d(ctx, 2 * BATCH, INPUTS), *half[2];
    for (int i = 0; i < 2; i++) half[i] = tower(ctx, hpml_slice(in, 0, i * BATCH, BATCH), i == 0);
    hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = in, .output = hpml_concat(half, 2, 0), .lr = 1 });
    samples(0, 2 * BATCH, x, y);
    ENSURE(hpml_trainer_step(t, x, y, 2 * BATCH, NULL) == HPML_OK);
    int64_t      count = 0;
    const float *g = hpml_trainer_array(t, HPML_ARRAY_GRADIENTS, &count);
    ENSURE(g && count == out.count);
    for (int64_t i = 0; i < count; i++) ENSURE_NEAR(g[i], out.rank[i], 1e-6);
    out.nodes[1] = nodes_of(hpml_trainer_graph(t));
    printf("    nodes: %d on each rank, %d with two towers\n", out.nodes[0], out.nodes[1]);
    ENSURE(out.nodes[1] > 2 * out.nodes[0]);
    hpml_ctx_free(ctx);
}

/* ---- parameters once in memory, for all ranks of a process */

typedef struct training {
    float   *memory; /* NULL: each rank has a copy */
    uint64_t hash[RANKS];
    size_t   bytes[RANKS];
    bool     norm, forgets, delayed;
} training;

static hpml_status train_shared(hpml_comm *c, void *user)
{
    training    *j    = (training *)user;
    hpml_ctx    *ctx  = hpml_comm_ctx(c);
    int          rank = hpml_comm_rank(c);
    float        x[RANKS * BATCH * INPUTS];
    int32_t      y[RANKS * BATCH];
    hpml_tensor *in = hpml_input_2d(ctx, BATCH, INPUTS), *h = linear(in, 64, NULL);
    if (j->norm) h = hpml_batchnorm(h, NULL);
    hpml_tensor *out = linear(hpml_tanh(h), 3, NULL);
    for (int r = 0; j->memory && r < hpml_comm_size(c); r++) {
        if (rank == r && !(j->forgets && r == 1)) hpml_params_place(ctx, j->memory, r > 0);
        hpml_barrier(c);
    }
    hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = in, .output = out, .lr = 0.1f, .momentum = 0.9f, .clip_norm = 1 });
    hpml_distributed *d = hpml_distribute(t, c, &(hpml_plan){ .delayed = j->delayed });
    if (j->memory) hpml_distribute_share(d);
    for (int s = 0; s < STEPS && hpml_ctx_status(ctx) == HPML_OK; s++) {
        samples(s, RANKS * BATCH, x, y);
        hpml_trainer_step(t, x + rank * BATCH * INPUTS, y + rank * BATCH, BATCH, NULL);
    }
    j->hash[rank]  = hpml_param_hash(ctx);
    j->bytes[rank] = hpml_ctx_bytes(ctx);
    hpml_barrier(c); /* until all have read the memory */
    return hpml_ctx_status(ctx);
}

TEST(ranks_that_share_parameters_train_as_ranks_with_copies)
{
    static const char *const run[] = { "threads:4", "clock:4" };
    float *memory = (float *)aligned_alloc(64, 1 << 14);
    for (int i = 0; i < 2; i++) {
        training         copies = { .memory = NULL }, shared = { .memory = memory };
        hpml_launch_desc d = { .run = run[i] };
        char             why[300] = "";
        ENSURE(hpml_launch(&d, train_shared, &copies, why, sizeof why) == HPML_OK);
        bool good = hpml_launch(&d, train_shared, &shared, why, sizeof why) == HPML_OK;
        if (!good) printf("    %s: %s\n", run[i], why);
        ENSURE(good);
        for (int r = 0; r < RANKS; r++) {
            ENSURE(shared.hash[r] == copies.hash[0] && copies.hash[r] == copies.hash[0]);
            ENSURE(shared.bytes[r] + (64 * INPUTS + 64 + 3 * 64 + 3) * sizeof(float) <= copies.bytes[r]);
        }
    }
    free(memory);
}

TEST(parameters_that_ranks_cannot_share_are_errors)
{
    float           *memory = (float *)aligned_alloc(64, 1 << 14);
    hpml_launch_desc d = { .run = "threads:4" };
    training         wrong[] = { { .memory = memory, .norm = true }, { .memory = memory, .forgets = true },
                                 { .memory = memory, .delayed = true } };
    static const char *const text[] = { "batchnorm has statistics", "not in the memory of rank 0's",
                                        "only strategy sync" };
    for (int i = 0; i < 3; i++) {
        char why[300] = "";
        ENSURE(hpml_launch(&d, train_shared, &wrong[i], why, sizeof why) != HPML_OK);
        if (!strstr(why, text[i])) printf("    %s\n", why);
        ENSURE(strstr(why, text[i]));
    }
    ENSURE(hpml_distribute_share(NULL) == HPML_ERR_ARGUMENT);
    free(memory);
}

/* ---- worlds of ranks in one process */

static hpml_status add_inner(hpml_comm *c, void *user)
{
    float *sum = (float *)user, x = (float)(hpml_comm_rank(c) + 1);
    hpml_status status = hpml_allreduce(c, &x, 1, NULL);
    if (hpml_comm_rank(c) == 0) *sum = x;
    return status;
}

/* Each of two ranks has a world of three ranks of its own; both worlds and the outer one add up at the same time. */
static hpml_status add_outer(hpml_comm *c, void *user)
{
    hpml_launch_desc d = { .run = "threads:3" };
    float            x = 0, *sum = (float *)user;
    hpml_status      status = hpml_launch(&d, add_inner, &x, NULL, 0);
    x *= (float)(hpml_comm_rank(c) + 1);
    if (status == HPML_OK) status = hpml_allreduce(c, &x, 1, NULL);
    if (hpml_comm_rank(c) == 0) *sum = x;
    return status;
}

TEST(worlds_in_one_process_do_not_disturb_each_other)
{
    float            sum = 0;
    hpml_launch_desc d = { .run = "threads:2" };
    ENSURE(hpml_launch(&d, add_outer, &sum, NULL, 0) == HPML_OK && sum == 6 + 12);
}
