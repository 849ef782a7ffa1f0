/* Axes of ranks: the places of ranks, the groups that ops use, all factorizations of a number of ranks. */
#include "../hpml.h"
#include "../hpml_comm.h"
#include "split_model.h"
#include "test.h"
#ifdef HPML_USE_MPI
#include <mpi.h>
#endif

enum { PIPES = 8 }; /* most stages of a pipeline */

static int process; /* the number of this process; without MPI 0 */

/* Runs fn on `ranks` ranks; the error's text is in `text`. */
static hpml_status launch(hpml_transport_kind transport, int ranks, const hpml_plan *plan, hpml_rank_fn *fn, void *user,
                          char text[512])
{
    text[0] = 0;
    return hpml_launch(&(hpml_launch_desc){ .transport = transport, .ranks = ranks, .timeout = 20, .plan = plan,
                                            .alone = true, .ctx.threads = 1 }, fn, user, text, 512);
}

/* Trains as one rank does and with the plan on `ranks` ranks, and compares losses, gradients and values. */
static bool trains_as_one(hpml_transport_kind transport, int ranks, const hpml_plan *plan, split_run *serial)
{
    char      text[512], words[128];
    split_run split = *serial;
    split.gradients = split.values = NULL;
    if (!serial->values && launch(HPML_TRANSPORT_THREADS, 1, NULL, split_train, serial, text) != HPML_OK)
        return printf("    serial: %s\n", text), false;
    hpml_status status = launch(transport, ranks, plan, split_train, &split, text);
    hpml_plan_text(plan, false, words, sizeof words);
    if (status != HPML_OK) return printf("    %d ranks, %s: %s\n", ranks, words, text), split_free(&split), false;
    if (process > 0) return true; /* the results are on rank 0 */
    double loss = 0;
    for (int i = 0; i < serial->steps; i++) loss = fmax(loss, fabs(split.loss[i] - serial->loss[i]));
    double gradient = split.floats == serial->floats ? 0 : 1e9, value = gradient;
    if (gradient == 0) gradient = split_differ(split.gradients, serial->gradients, serial->floats);
    if (value == 0) value = split_differ(split.values, serial->values, serial->floats);
    const bool good = loss <= 1e-6 * serial->loss[0] && gradient <= 1e-5 && value <= 1e-4;
    printf("    %d ranks, %s: loss %.1e, gradient %.1e, values %.1e%s\n", ranks, words, loss, gradient, value,
           good ? "" : " WRONG");
    split_free(&split);
    return good;
}

/* Trains by all factorizations of a number of ranks into data x pipe x tensor, with each .shard that a plan may have,
   and the pipelines among them with schedule zero_bubble, too, as one rank does. Returns the number of plans with
   .shard; 0: one is wrong. */
static int factorizations(hpml_transport_kind transport, int ranks)
{
    split_run serial = { .model = split_small, .optimizer = HPML_OPT_SGD, .steps = 3 };
    int       axes = 0, plans = 0;
    bool      good = true;
    for (int pipe = 1; pipe <= PIPES && pipe <= ranks; pipe *= 2) {
        for (int tensor = 1; tensor * pipe <= ranks; tensor *= 2, axes++) {
            for (int shard = 0; shard <= 3; shard++) {
                hpml_plan       plan  = { .pipe = pipe, .tensor = tensor, .shard = shard };
                hpml_plan_facts facts = { .ranks = ranks, .batch = serial.model.batch };
                if (hpml_plan_check(&plan, &facts, NULL, 0) != HPML_OK) continue;
                good = trains_as_one(transport, ranks, &plan, &serial) && good;
                plans++;
            }
            hpml_plan bubble = { .pipe = pipe, .tensor = tensor, .schedule = HPML_PIPE_ZERO_BUBBLE };
            if (pipe > 1) good = trains_as_one(transport, ranks, &bubble, &serial) && good;
        }
    }
    if (process == 0) printf("    %d ranks: %d factorizations, %d plans with shard 0 to 3\n", ranks, axes, plans);
    split_free(&serial);
    return good ? plans : 0;
}

#ifdef HPML_USE_MPI
static void mpi_end(void) { MPI_Finalize(); }

__attribute__((constructor)) static void mpi_begin(void)
{
    int level;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &process);
    atexit(mpi_end);
}

TEST(all_factorizations_of_processes_train_as_one_rank)
{
    int ranks = 1;
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    ENSURE(factorizations(HPML_TRANSPORT_MPI, ranks) > 0);
}
#else
/* Number of the rank with these places, tensor fastest. */
static int rank_of(const hpml_mesh *m, const int at[HPML_AXES])
{
    int rank = at[HPML_AXIS_DATA];
    rank = rank * m->size[HPML_AXIS_PIPE] + at[HPML_AXIS_PIPE];
    rank = rank * m->size[HPML_AXIS_EXPERT] + at[HPML_AXIS_EXPERT];
    rank = rank * m->size[HPML_AXIS_SEQUENCE] + at[HPML_AXIS_SEQUENCE];
    return rank * m->size[HPML_AXIS_TENSOR] + at[HPML_AXIS_TENSOR];
}

/* Compares each function of the group of axis k, on n floats, with the numbers that the ranks of the axis have. */
static bool group_is_right(const hpml_mesh *m, int k, int64_t n)
{
    enum { MOST = 8, FLOATS = 40 };
    const hpml_group *g = hpml_ctx_group(hpml_comm_ctx(m->all), (hpml_axis)k);
    int               ranks[MOST] = { 0 }, at[HPML_AXES];
    float             mine[FLOATS], x[FLOATS], all[MOST * FLOATS], in[MOST * FLOATS];
    bool              good = g->size == m->size[k] && g->rank == m->at[k];
    for (int r = 0; r < g->size; r++) {
        for (int i = 0; i < HPML_AXES; i++) at[i] = i == k ? r : m->at[i];
        ranks[r] = rank_of(m, at);
    }
    const int me = ranks[g->rank];
    good = good && me == hpml_comm_rank(m->all);
#define VALUE(rank, i) ((float)(100 * (rank) + (int)(i)))
    for (int i = 0; i < n; i++) mine[i] = x[i] = VALUE(me, i);
    good = good && g->sum(g->user, x, n) == HPML_OK;
    for (int i = 0; i < n; i++) {
        float sum = 0;
        for (int r = 0; r < g->size; r++) sum += VALUE(ranks[r], i);
        good = good && x[i] == sum;
    }
    memcpy(x, mine, sizeof x);
    good = good && g->max(g->user, x, n) == HPML_OK;
    for (int i = 0; i < n; i++) good = good && x[i] == VALUE(ranks[g->size - 1], i);
    good = good && g->gather(g->user, mine, all, n) == HPML_OK;
    for (int i = 0; i < n * g->size; i++) good = good && all[i] == VALUE(ranks[i / n], i % n);
    for (int i = 0; i < n * g->size; i++) all[i] = VALUE(me, i);
    good = good && g->scatter(g->user, all, x, n) == HPML_OK;
    for (int i = 0; i < n; i++) {
        float sum = 0;
        for (int r = 0; r < g->size; r++) sum += VALUE(ranks[r], g->rank * n + i);
        good = good && x[i] == sum;
    }
    for (int i = 0; i < n * g->size; i++) good = good && all[i] == VALUE(me, i); /* scatter's input is const */
    good = good && g->swap(g->user, all, in, n) == HPML_OK;
    for (int i = 0; i < n * g->size; i++) good = good && in[i] == VALUE(ranks[i / n], g->rank * n + i % n);
    for (int shift = -1; shift <= g->size; shift++) {
        const int from = ranks[((g->rank - shift) % g->size + g->size) % g->size];
        good = good && g->pass(g->user, mine, x, n, shift) == HPML_OK;
        for (int i = 0; i < n; i++) good = good && x[i] == VALUE(from, i);
    }
    for (int root = 0; root < g->size; root++) {
        memcpy(x, mine, sizeof x);
        good = good && g->bcast(g->user, x, n, root) == HPML_OK;
        for (int i = 0; i < n; i++) good = good && x[i] == VALUE(ranks[root], i);
    }
    return good;
}

static hpml_status check_groups(hpml_comm *c, void *user)
{
    const hpml_mesh *m    = hpml_comm_mesh(c);
    bool             good = m && m->all == c && rank_of(m, m->at) == hpml_comm_rank(c);
    for (int k = 0; k < HPML_AXES && good; k++) {
        good = (m->axis[k] != NULL) == (m->size[k] > 1);
        if (m->axis[k]) good = good && hpml_comm_size(m->axis[k]) == m->size[k];
        if (m->axis[k]) good = good && hpml_comm_rank(m->axis[k]) == m->at[k];
        for (int n = 1; n <= 10 && good; n += 9) good = group_is_right(m, k, n);
    }
    good = good && hpml_comm_size(m->replicas) ==
                       m->size[HPML_AXIS_DATA] * m->size[HPML_AXIS_SEQUENCE] * m->size[HPML_AXIS_EXPERT];
    if (good) __atomic_add_fetch((int *)user, 1, __ATOMIC_RELAXED);
    return hpml_ctx_status(hpml_comm_ctx(c));
}

TEST(groups_are_the_axes)
{
    static const hpml_plan plans[] = {
        { .data = 0 }, { .tensor = 8 }, { .pipe = 2, .tensor = 2 }, { .data = 2, .expert = 2, .sequence = 2 },
        { .sequence = 4 }, { .expert = 8 }, { .data = 8, .algorithm = HPML_CENTRAL }, { .pipe = 4, .sequence = 2 },
    };
    char text[512];
    for (size_t i = 0; i < sizeof plans / sizeof plans[0]; i++) {
        int good = 0;
        ENSURE(launch(HPML_TRANSPORT_THREADS, 8, &plans[i], check_groups, &good, text) == HPML_OK && good == 8);
    }
    int       good  = 0;
    hpml_plan large = { .data = 2, .pipe = 2, .expert = 3, .sequence = 2, .tensor = 3 };
    ENSURE(launch(HPML_TRANSPORT_CLOCK, 72, &large, check_groups, &good, text) == HPML_OK && good == 72);
}

static hpml_status read_mesh(hpml_comm *c, void *user)
{
    const hpml_mesh *m = hpml_comm_mesh(c);
    if (hpml_comm_rank(c) == 0) *(int *)user = m ? m->size[HPML_AXIS_TENSOR] : -1;
    return HPML_OK;
}

/* HPML_PLAN alone splits the model, and takes the place of the program's own axes; what is wrong is named. */
TEST(a_mesh_from_the_environment)
{
    const hpml_plan two = { .tensor = 2 };
    int             tensor = 0;
    char            text[512];
    ENSURE(launch(HPML_TRANSPORT_THREADS, 4, NULL, read_mesh, &tensor, text) == HPML_OK && tensor == -1);
    ENSURE(launch(HPML_TRANSPORT_THREADS, 4, &two, read_mesh, &tensor, text) == HPML_OK && tensor == 2);
    setenv("HPML_PLAN", "tensor=4,codec=onebit", 1);
    ENSURE(launch(HPML_TRANSPORT_THREADS, 4, NULL, read_mesh, &tensor, text) == HPML_OK && tensor == 4);
    ENSURE(launch(HPML_TRANSPORT_THREADS, 4, &two, read_mesh, &tensor, text) == HPML_OK && tensor == 4);
    ENSURE(launch(HPML_TRANSPORT_THREADS, 6, &two, read_mesh, &tensor, text) == HPML_ERR_ARGUMENT);
    ENSURE(strstr(text, "6 ranks are no multiple of tensor 4 = 4 ranks"));
    setenv("HPML_PLAN", "codec=onebit", 1);
    ENSURE(launch(HPML_TRANSPORT_THREADS, 4, NULL, read_mesh, &tensor, text) == HPML_OK && tensor == -1);
    setenv("HPML_PLAN", "tensr=4", 1);
    ENSURE(launch(HPML_TRANSPORT_THREADS, 4, NULL, read_mesh, &tensor, text) == HPML_ERR_ARGUMENT);
    ENSURE(strstr(text, "HPML_PLAN") && strstr(text, "tensr") && strstr(text, "sequence"));
    unsetenv("HPML_PLAN");
}

static hpml_status set_plans(hpml_comm *c, void *user)
{
    const int wrong = *(const int *)user;
    hpml_plan plan  = { .tensor = 2 };
    if (wrong == 0 && hpml_comm_rank(c) == 1) plan.tensor = 4;
    if (wrong == 1) hpml_linear(hpml_input_2d(hpml_comm_ctx(c), 2, 2), 2, NULL);
    hpml_status status = hpml_comm_set_plan(c, &plan);
    if (wrong == 2 && status == HPML_OK) status = hpml_comm_set_plan(c, &plan);
    return status;
}

TEST(a_plan_is_set_once_and_before_the_model)
{
    static const char *const says[] = { "ranks have different plans", "set groups first",
                                        "the communicator has a plan" };
    for (int wrong = 0; wrong < 3; wrong++) {
        char        text[512];
        hpml_status status = launch(HPML_TRANSPORT_THREADS, 4, NULL, set_plans, &wrong, text);
        if (!strstr(text, says[wrong])) printf("    %s\n", text);
        ENSURE(status != HPML_OK && strstr(text, says[wrong]));
    }
}

TEST(all_factorizations_train_as_one_rank)
{
    ENSURE(factorizations(HPML_TRANSPORT_THREADS, 8) == 40); /* each of the ten with shard 0 to 3 */
}

static const hpml_plan splits[] = {
    { .tensor = 2 }, { .data = 1, .tensor = 8 }, { .pipe = 4 }, { .pipe = 2, .tensor = 2 }, { .pipe = 2, .tensor = 4 },
    { .pipe = 4, .schedule = HPML_PIPE_1F1B, .shard = 3 }, { .pipe = 2, .tensor = 2, .shard = 2 },
    { .pipe = 4, .schedule = HPML_PIPE_STASH, .shard = 1 }, { .pipe = 2, .schedule = HPML_PIPE_ZERO_BUBBLE },
};

/* A rank that fails is named by all others, whatever its place. */
TEST(a_rank_that_fails_is_named_by_all)
{
    for (size_t i = 0; i < sizeof splits / sizeof splits[0]; i++)
        for (int rank = 0; rank < 8; rank += 7) {
            split_run run = { .model = split_small, .steps = 3, .fails = 1 + rank };
            char      text[512], name[16];
            ENSURE(launch(HPML_TRANSPORT_THREADS, 8, &splits[i], split_train, &run, text) == HPML_ERR_WRITE);
            snprintf(name, sizeof name, "rank %d", rank);
            for (int r = 0; r < 8; r++) {
                const bool good = strstr(run.errors[r], "a disk is full") && (r == rank || strstr(run.errors[r], name));
                if (!good) printf("    rank %d: %s\n", r, run.errors[r]);
                split_free(&run);
                ENSURE(good);
            }
        }
}

/* Other ways to exchange gradients, and parameters, work inside the replicas: with the bits of as many whole replicas,
   but for the last bits of the sums of layers. */
TEST(strategies_work_on_replicas)
{
    static const hpml_plan plans[] = {
        { .delayed = true }, { .codec.kind = HPML_CODEC_BF16 }, { .exact = true, .leaf = 2 },
        { .strategy = HPML_STRATEGY_LOCAL, .period = 2 }, { .strategy = HPML_STRATEGY_BLOCK, .period = 2 },
        { .strategy = HPML_STRATEGY_GOSSIP }, { .strategy = HPML_STRATEGY_ELASTIC }, { .global_batch = 13 },
        { .bucket_bytes = 1 }, { .algorithm = HPML_CENTRAL },
    };
    for (size_t i = 0; i < sizeof plans / sizeof plans[0]; i++) {
        split_run two = { .model = split_small, .steps = 4, .plan = &plans[i] }, four = two;
        hpml_plan tensor = { .tensor = 2 };
        char      text[512], words[128];
        hpml_plan_text(&plans[i], false, words, sizeof words);
        hpml_status status = launch(HPML_TRANSPORT_THREADS, 2, NULL, split_train, &two, text);
        if (status == HPML_OK) status = launch(HPML_TRANSPORT_THREADS, 4, &tensor, split_train, &four, text);
        if (status != HPML_OK) printf("    %s: %s\n", words, text);
        ENSURE(status == HPML_OK);
        const double gradient = split_differ(four.gradients, two.gradients, two.floats);
        const double value = split_differ(four.values, two.values, two.floats);
        printf("    %s: gradient %.1e, values %.1e\n", words, gradient, value);
        split_free(&two);
        split_free(&four);
        ENSURE(value < (plans[i].codec.kind ? 1e-3 : 1e-5));
    }
}

/* Loads the checkpoint `from`, if any, on `ranks` ranks, trains for some steps, and saves the checkpoint `to`. */
static bool resumes(const char *plan, int ranks, const char *from, int steps, const char *to)
{
    split_run run = { .model = split_small, .optimizer = HPML_OPT_ADAM, .steps = steps, .load = from, .save = to };
    hpml_plan axes = { 0 };
    char      text[512] = "";
    bool      good = hpml_plan_parse(plan, &axes, text, sizeof text) == HPML_OK;
    good = good && launch(HPML_TRANSPORT_THREADS, ranks, &axes, split_train, &run, text) == HPML_OK;
    if (!good) printf("    %s, %d ranks, %s: %s\n", plan, ranks, to, text);
    split_free(&run);
    return good;
}

static bool same_files(const char *a, const char *b)
{
    FILE *f = fopen(a, "rb"), *g = fopen(b, "rb");
    bool  same = f && g;
    for (int x = 0, y = 0; same && x != EOF; same = x == y) {
        x = getc(f);
        y = getc(g);
    }
    if (f) fclose(f);
    if (g) fclose(g);
    return same;
}

/* A checkpoint of any axes loads on any others, and is the same file when saved there. */
TEST(a_checkpoint_of_a_mesh_is_that_of_one_rank)
{
    static const char *const paths[] = { "build/mesh_a.ckpt", "build/mesh_b.ckpt", "build/mesh_c.ckpt" };
    static const struct {
        const char *plan, *other;
        int         ranks, others;
    } cases[] = {
        { "tensor=2", "", 8, 1 },
        { "tensor=4", "tensor=2", 4, 8 },
        { "tensor=2,pipe=2", "", 8, 1 },
        { "pipe=2", "tensor=2", 4, 4 },
        { "shard=1,tensor=2", "pipe=2", 4, 4 },
        { "shard=3,pipe=2", "shard=2,pipe=2,schedule=1f1b", 4, 4 },
        { "shard=1,pipe=2,schedule=1f1b", "shard=3,pipe=2,tensor=2", 4, 8 },
        { "pipe=2,tensor=2,codec=onebit,codec.min_elements=16", "codec=onebit,codec.min_elements=16", 8, 2 },
        { "pipe=2,delayed=1", "tensor=2,delayed=1", 4, 4 },
        { "pipe=2,strategy=block,period=2", "strategy=block,period=2", 4, 2 },
        { "tensor=2,codec=onebit,codec.min_elements=16", "codec=onebit,codec.min_elements=16", 8, 4 },
        { "tensor=2,exact=1,leaf=2,codec=onebit,codec.min_elements=16",
          "tensor=4,exact=1,leaf=2,codec=onebit,codec.min_elements=16", 4, 4 },
        { "tensor=2,delayed=1", "tensor=4,delayed=1", 4, 4 },
        { "shard=1", "", 4, 1 },
        { "shard=3", "shard=2", 4, 3 },
        { "tensor=2,shard=3", "shard=1", 4, 2 },
        { "pipe=2,tensor=2", "", 8, 1 },
        { "pipe=4,schedule=interleaved", "pipe=2,tensor=2,schedule=1f1b", 4, 8 },
        { "tensor=2,strategy=block,period=2", "strategy=block,period=2", 4, 2 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ENSURE(resumes(cases[i].plan, cases[i].ranks, NULL, 2, paths[0]));
        ENSURE(resumes(cases[i].other, cases[i].others, paths[0], 0, paths[1]));
        ENSURE(resumes(cases[i].plan, cases[i].ranks, paths[1], 0, paths[2]));
        if (!same_files(paths[0], paths[1]) || !same_files(paths[0], paths[2])) printf("    %s\n", cases[i].plan);
        ENSURE(same_files(paths[0], paths[1]) && same_files(paths[0], paths[2]));
    }
    /* On the axes on which it was saved a training continues bit for bit. */
    ENSURE(resumes("tensor=2,codec=onebit", 4, NULL, 4, paths[0]));
    ENSURE(resumes("tensor=2,codec=onebit", 4, NULL, 2, paths[1]));
    ENSURE(resumes("tensor=2,codec=onebit", 4, paths[1], 2, paths[2]));
    ENSURE(same_files(paths[0], paths[2]) && !same_files(paths[0], paths[1]));
    ENSURE(resumes("shard=3", 4, NULL, 4, paths[0]));
    ENSURE(resumes("shard=3", 4, NULL, 2, paths[1]));
    ENSURE(resumes("shard=3", 4, paths[1], 2, paths[2]));
    ENSURE(same_files(paths[0], paths[2]));
    for (int i = 0; i < 3; i++) remove(paths[i]);
}

/* All factorizations of 8 ranks begin with the bytes of one rank's file, and write the bytes of a file that they have
   loaded. */
TEST(files_of_all_factorizations_are_those_of_one_rank)
{
    static const char *const paths[] = { "build/mesh_first.ckpt", "build/mesh_later.ckpt", "build/mesh_ours.ckpt" };
    int plans = 0;
    ENSURE(resumes("", 1, NULL, 0, paths[0]) && resumes("", 1, NULL, 2, paths[1]));
    ENSURE(!same_files(paths[0], paths[1]));
    for (int pipe = 1; pipe <= 8; pipe *= 2)
        for (int tensor = 1; tensor * pipe <= 8; tensor *= 2)
            for (int shard = 0; shard <= 3; shard += 3, plans++) {
                char plan[60];
                snprintf(plan, sizeof plan, "pipe=%d,tensor=%d,shard=%d", pipe, tensor, shard);
                ENSURE(resumes(plan, 8, NULL, 0, paths[2]));
                if (!same_files(paths[0], paths[2])) printf("    %s: first values\n", plan);
                ENSURE(same_files(paths[0], paths[2]));
                ENSURE(resumes(plan, 8, paths[1], 0, paths[2]));
                if (!same_files(paths[1], paths[2])) printf("    %s: loaded\n", plan);
                ENSURE(same_files(paths[1], paths[2]));
            }
    ENSURE(plans == 20);
    for (int i = 0; i < 3; i++) remove(paths[i]);
}

/* A plan whose axes but data are 1 computes the bits of no plan, and sends what no plan sends. */
TEST(a_plan_of_ones_costs_nothing)
{
    const hpml_plan ones = { .pipe = 1, .tensor = 1, .sequence = 1, .expert = 1 };
    for (int ranks = 1; ranks <= 4; ranks += 3) {
        split_run none = { .model = split_small, .steps = 3 }, one = none;
        char      text[512];
        ENSURE(launch(HPML_TRANSPORT_CLOCK, ranks, NULL, split_train, &none, text) == HPML_OK);
        ENSURE(launch(HPML_TRANSPORT_CLOCK, ranks, &ones, split_train, &one, text) == HPML_OK);
        const size_t bytes = (size_t)none.floats * sizeof(float);
        const bool   same = memcmp(none.values, one.values, bytes) == 0 &&
                          memcmp(none.gradients, one.gradients, bytes) == 0;
        split_free(&none);
        split_free(&one);
        ENSURE(same && none.report.bytes == one.report.bytes && none.report.step_s == one.report.step_s);
    }
}

/* What the plan of hpml_distribute and that of the launch contradict. */
TEST(other_axes_than_those_of_the_launch_are_refused)
{
    static const struct {
        hpml_plan   plan;
        const char *says;
    } cases[] = {
        { { .tensor = 4 }, "the plan has tensor=4, and the model was recorded for 2; set pipe, tensor, sequence and" },
        { { .sequence = 2 }, "the plan has sequence=2, and the model was recorded for 1" },
        { { .data = 4 }, "data 4 x tensor 2 + servers 0 = 8 ranks, and 4 were started" },
        { { .strategy = HPML_STRATEGY_PS, .servers = 2 }, "servers and hogwild" },
        { { .codec.kind = HPML_CODEC_LOWRANK }, "codec topk and lowrank pack whole tensors" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        split_run run = { .model = split_small, .steps = 1, .plan = &cases[i].plan };
        char      text[512];
        ENSURE(launch(HPML_TRANSPORT_THREADS, 4, &splits[0], split_train, &run, text) != HPML_OK);
        if (!strstr(text, cases[i].says)) printf("    %s\n", text);
        split_free(&run);
        ENSURE(strstr(text, cases[i].says));
    }
}

/* 64 ranks in virtual time. */
TEST(many_ranks_train_as_one)
{
    split_run serial = { .model = split_small, .steps = 2 };
    hpml_plan plan   = { .pipe = 4, .tensor = 4 };
    bool      good   = trains_as_one(HPML_TRANSPORT_CLOCK, 64, &plan, &serial);
    split_free(&serial);
    ENSURE(good);
}
#endif
