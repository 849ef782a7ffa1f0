/* Pipelines that train: against one rank with the same model, in counts, and in virtual time. */
#include <pthread.h>
#include <sched.h>
#include "../hpml.h"
#include "../hpml_comm.h"
#include "test.h"

enum { IN = 12, WIDTH = 16, OUT = 5, SAMPLES = 32, MOST = 8192 };
typedef enum model { MLP, SKIP, TIED, NORM, DROP } model;

typedef struct job {
    hpml_plan plan;
    model     model;
    int       batch, steps, accumulate; /* samples of a step of all ranks; 0 steps: 3; 0 accumulate: 1 */
    int       first;        /* number of the first step, on which the samples depend */
    int       fits;         /* not 0: trains by hpml_trainer_fit on so many samples; the last batch is short */
    hpml_opt  optimizer;
    float     clip;         /* clip_norm */
    bool      slow;         /* the network is, in virtual time, so that exchanges run in the background */
    bool      again;        /* the results of groups of three layers are computed again */
    const int32_t *cut;
    /* results */
    double    worst;        /* largest difference of a parameter from one rank's */
    double    loss, accuracy; /* differences of a step's loss and accuracy, on all ranks */
    double    outputs;      /* differences of predicted outputs and the evaluated loss */
    double    seconds;      /* of a step */
    int64_t   bytes[8];     /* that rank 0 has sent along the pipe to each stage in the last step */
    size_t    planned[8];   /* bytes of each rank's activations or, without a flush, of its optimizer's states */
    float     mean;         /* the first running mean of a batchnorm */
    int       params[8];    /* parameters with values on each rank */
    char      text[400];    /* of the report */
    float    *values;       /* NULL, or gets the parameters of the first replica */
} job;

static double drawn(uint32_t *dice)
{
    *dice = *dice * 1664525u + 1013904223u;
    return (double)(*dice >> 8) / 8388608 - 1;
}

static void draw(float *x, int32_t *y, bool tokens)
{
    uint32_t dice = 5;
    for (int i = 0; i < SAMPLES * IN; i++) {
        double  v     = drawn(&dice);
        int32_t token = (int32_t)((v + 1) * 5);
        if (tokens) memcpy(&x[i], &token, sizeof token);
        else x[i] = (float)v;
    }
    for (int i = 0; i < SAMPLES; i++) y[i] = (int32_t)((drawn(&dice) + 1) / 2 * OUT) % OUT;
}

static hpml_tensor *layer(hpml_tensor *x, int width, hpml_act act)
{
    hpml_linear_desc d = { .activation = act };
    return hpml_linear(x, width, &d);
}

/* Eight layers. SKIP: what the first computes is added in the middle and at the end; TIED: an embedding whose table is
   the last layer's weight as well. */
static hpml_trainer *record(hpml_ctx *ctx, const job *j, int batch, int accumulate)
{
    hpml_tensor *x, *h, *first;
    if (j->model == TIED) {
        const hpml_param_desc place = { .name = "table", .ndim = 2, .shape = { 10, WIDTH }, .init = HPML_INIT_NORMAL,
                                        .init_scale = 0.3f };
        hpml_tensor *table = hpml_param_create(ctx, &place);
        hpml_embedding_desc e = { .weight = table };
        x = hpml_input_tokens(ctx, batch, IN);
        h = hpml_sum(hpml_embedding(x, 10, WIDTH, &e), 1);
        for (int i = 0; i < 4; i++) h = layer(h, WIDTH, HPML_ACT_TANH);
        h = hpml_matmul(h, table, false, true);
        return hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = x, .output = h, .lr = 0.1f, .momentum = 0.9f,
                                                              .accumulate = accumulate, .clip_norm = j->clip });
    }
    x = hpml_input_2d(ctx, batch, IN);
    first = h = layer(x, WIDTH, HPML_ACT_TANH);
    for (int i = 0; i < 6; i++) {
        if (j->again && i % 3 == 0) hpml_recompute(ctx, true);
        h = layer(h, WIDTH, HPML_ACT_TANH);
        if (j->again && i % 3 == 2) hpml_recompute(ctx, false);
        if (j->model == NORM && i == 1) h = hpml_batchnorm(h, NULL);
        if (j->model == DROP && i % 2 == 1) h = hpml_dropout(h, 0.2f);
        if (j->model == SKIP && (i == 3 || i == 5)) h = hpml_add(h, first);
    }
    h = layer(h, OUT, HPML_ACT_NONE);
    return hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = x, .output = h, .lr = j->optimizer == HPML_OPT_ADAM ? 0.01f : 0.1f, .momentum = 0.9f,
        .accumulate = accumulate, .clip_norm = j->clip,
        .optimizer = j->optimizer });
}

static int steps_of(const job *j) { return j->steps > 0 ? j->steps : 3; }

/* Trains `steps` steps: batches of `batch` samples, each in `parts` calls, of which this rank takes its share. Returns
   the loss of the last step, and *accuracy. */
static float train(hpml_trainer *t, const job *j, int batch, int parts, int share, int shares, float *accuracy)
{
    static const int64_t shape[1] = { IN };
    hpml_step_info info = { 0 };
    float          x[SAMPLES * IN], loss = 0;
    int32_t        y[SAMPLES];
    int            rows = batch / parts / shares;
    hpml_ctx      *ctx = hpml_trainer_settings(t)->input->ctx;
    draw(x, y, j->model == TIED);
    if (j->fits) {
        hpml_dtype    type = j->model == TIED ? HPML_DTYPE_I32 : HPML_DTYPE_F32;
        hpml_dataset *data = hpml_dataset_create(ctx, j->fits, type, 1, shape, x, HPML_DTYPE_I32, 1, y);
        hpml_trainer_fit(t, data, &(hpml_fit_desc){ .epochs = 2 });
        return 0;
    }
    for (int s = 0; s < steps_of(j); s++) {
        loss = *accuracy = 0;
        for (int i = 0; i < parts; i++) {
            int at = ((j->first + s) * 4 + i * rows * shares + share * rows) % SAMPLES;
            if (at + rows > SAMPLES) at = 0;
            hpml_trainer_step(t, x + at * IN, y + at, rows, &info);
            loss += info.loss / (float)parts;
            *accuracy += info.accuracy / (float)parts;
        }
    }
    return loss;
}

typedef struct result { float values[MOST], out[SAMPLES * 10], loss, accuracy; hpml_metrics metrics; } result;

static void judge(hpml_trainer *t, const job *j, result *r) /* predicts and evaluates */
{
    static const int64_t shape[1] = { IN };
    float         x[SAMPLES * IN];
    int32_t       y[SAMPLES];
    hpml_ctx     *ctx  = hpml_trainer_settings(t)->input->ctx;
    hpml_dtype    type = j->model == TIED ? HPML_DTYPE_I32 : HPML_DTYPE_F32;
    draw(x, y, j->model == TIED);
    hpml_dataset *data = hpml_dataset_create(ctx, 27, type, 1, shape, x, HPML_DTYPE_I32, 1, y);
    memset(&r->metrics, 0, sizeof r->metrics);
    hpml_trainer_evaluate(t, data, &r->metrics);
    hpml_trainer_predict(t, x, SAMPLES - 3, r->out);
}

/* One rank: every step is `parts` micro-batches, accumulated. */
static result *serial(const job *j, int parts)
{
    result       *r   = (result *)calloc(1, sizeof *r);
    hpml_ctx     *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1, .seed = 4 });
    hpml_trainer *t   = record(ctx, j, j->batch / parts, parts * (j->accumulate > 0 ? j->accumulate : 1));
    r->loss = train(t, j, j->batch * (j->accumulate > 0 ? j->accumulate : 1),
                    parts * (j->accumulate > 0 ? j->accumulate : 1), 0, 1, &r->accuracy);
    for (int k = 0, at = 0; k < hpml_param_count(ctx); k++) {
        hpml_tensor *p = hpml_param_at(ctx, k);
        memcpy(r->values + at, p->data, (size_t)hpml_tensor_count(p) * sizeof(float));
        at += (int)hpml_tensor_count(p);
    }
    judge(t, j, r);
    if (hpml_ctx_status(ctx) != HPML_OK) printf("    %s\n", hpml_ctx_error(ctx));
    hpml_ctx_free(ctx);
    return r;
}

static result *expected;

/* The largest difference of a parameter from one rank's: of those with values here or, `joined`, of all. */
static double differs(hpml_trainer *t, bool joined)
{
    static __thread float whole[MOST];
    hpml_ctx *ctx   = hpml_trainer_settings(t)->input->ctx;
    double    worst = 0;
    for (int k = 0, place = 0; k < hpml_param_count(ctx); k++) {
        const hpml_tensor *p  = hpml_param_at(ctx, k);
        const float       *at = p->data;
        if (joined && hpml_trainer_collect(t, k, HPML_ARRAY_VALUES, whole) == HPML_OK) at = whole;
        for (int64_t i = 0; at && i < hpml_tensor_count(p); i++)
            worst = fmax(worst, fabs((double)at[i] - (double)expected->values[place + i]));
        place += (int)hpml_tensor_count(p);
    }
    return worst;
}

static hpml_status rank_main(hpml_comm *c, void *user)
{
    job             *j    = (job *)user;
    hpml_ctx        *ctx  = hpml_comm_ctx(c);
    const hpml_mesh *m    = hpml_comm_mesh(c);
    const int        rank = hpml_comm_rank(c), data = m ? m->size[HPML_AXIS_DATA] : 1;
    const int        at = m ? m->at[HPML_AXIS_DATA] : 0, parts = j->accumulate > 0 ? j->accumulate : 1;
    hpml_trainer    *t = record(ctx, j, j->batch / data, parts);
    hpml_plan        plan = j->plan;
    plan.cut = j->cut;
    hpml_distributed *d = hpml_distribute(t, c, &plan);
    if (!d) return hpml_ctx_status(ctx);
    for (int i = 0; i < m->size[HPML_AXIS_PIPE] && rank == 0; i++)
        j->bytes[i] = -hpml_comm_bytes_to(m->axis[HPML_AXIS_PIPE], i);
    float accuracy = 0, loss = train(t, j, j->batch * parts, parts, at, data, &accuracy);
    for (int i = 0; i < m->size[HPML_AXIS_PIPE] && rank == 0; i++)
        j->bytes[i] += hpml_comm_bytes_to(m->axis[HPML_AXIS_PIPE], i);
    hpml_distribute_finish(d);
    if (rank == 0) hpml_distribute_text(d, j->text, sizeof j->text);
    hpml_memory planned;
    hpml_graph_memory(hpml_trainer_graph(t), &planned);
    j->planned[rank] = planned.activations;
    double worst = differs(t, plan.shard > 2), outputs = 0;
    double off = data == 1 ? fabs((double)loss - (double)expected->loss) : 0;
    double hits = data == 1 ? fabs((double)accuracy - (double)expected->accuracy) : 0;
    for (int k = 0, place = 0; k < hpml_param_count(ctx); k++) {
        hpml_tensor *p = hpml_param_at(ctx, k);
        if (j->values && p->data && at == 0) { /* two stages have the values of a tied parameter */
            static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;
            pthread_mutex_lock(&one);
            memcpy(j->values + place, p->data, (size_t)hpml_tensor_count(p) * sizeof(float));
            pthread_mutex_unlock(&one);
        }
        place += (int)hpml_tensor_count(p);
        if (p->data) j->params[rank]++;
        if (at == 0 && p->data && strstr(p->name, "running_mean")) j->mean = p->data[0];
    }
    static __thread result mine;
    memset(&mine, 0, sizeof mine);
    judge(t, j, &mine);
    for (int i = 0; i < (SAMPLES - 3) * OUT; i++)
        outputs = fmax(outputs, fabs((double)mine.out[i] - (double)expected->out[i]));
    outputs = fmax(outputs, fabs(mine.metrics.loss - expected->metrics.loss));
    outputs = fmax(outputs, fabs(mine.metrics.accuracy - expected->metrics.accuracy));
    double all[4] = { worst, outputs, off, hits };
    hpml_allreduce(c, all, 4, &(hpml_allreduce_desc){ .element = HPML_ELEMENT_F64, .reduce = HPML_MAX });
    if (rank == 0) {
        j->worst    = all[0];
        j->outputs  = all[1];
        j->loss     = all[2];
        j->accuracy = all[3];
    }
    return hpml_ctx_status(ctx);
}

static hpml_status pipeline(job *j, int ranks, int parts, char text[512])
{
    text[0]  = 0;
    expected = serial(j, parts);
    hpml_launch_desc launch = { .ranks = ranks, .timeout = 20, .plan = &j->plan, .ctx = { .threads = 1, .seed = 4 } };
    if (j->slow) launch.transport = HPML_TRANSPORT_CLOCK;
    if (j->slow) launch.network.inside.latency = 1e-4;
    hpml_status status = hpml_launch(&launch, rank_main, j, text, 512);
    free(expected);
    if (status != HPML_OK) printf("    %s\n", text);
    return status;
}

static job job_of(model what, int pipe, hpml_pipe_kind schedule, int micro, int batch)
{
    job j = { 0 };
    j.model         = what;
    j.plan.pipe     = pipe;
    j.plan.schedule = schedule;
    j.plan.micro    = micro;
    j.batch         = batch;
    return j;
}

/* The gradient of m micro-batches is that of one rank which accumulates them, bit for bit. */
TEST(flush_is_one_rank_that_accumulates)
{
    static const hpml_pipe_kind kinds[] = { HPML_PIPE_GPIPE, HPML_PIPE_1F1B, HPML_PIPE_INTERLEAVED,
                                            HPML_PIPE_ZERO_BUBBLE };
    char text[512];
    for (int k = 0; k < 4; k++)
        for (int p = 2; p <= 4; p += 2)
            for (int m = 1; m <= 8; m = m == 1 ? 4 : m + 4) {
                job j = job_of(MLP, p, kinds[k], m, 16);
                ENSURE(pipeline(&j, p, m, text) == HPML_OK);
                ENSURE(j.worst == 0);
                ENSURE_NEAR(j.loss, 0, 1e-6);
                ENSURE_NEAR(j.accuracy, 0, 1e-6);
                ENSURE_NEAR(j.outputs, 0, 1e-5);
            }
}

/* A profile of one rank knows that an op takes longer than its operations say. */
typedef struct profiled { hpml_profile_row rows[64]; int count, ops; hpml_plan plan; int32_t stages[64]; } profiled;

static hpml_status cut_by_profile(hpml_comm *c, void *user)
{
    profiled     *p    = (profiled *)user;
    const job     j    = job_of(MLP, 2, HPML_PIPE_GPIPE, 2, 8);
    hpml_trainer *t    = record(hpml_comm_ctx(c), &j, 8, 1);
    hpml_plan     plan = p->plan;
    if (hpml_comm_rank(c) > 0 && plan.profile_rows == p->count) plan.profile = NULL; /* rank 0 decides */
    if (!hpml_distribute(t, c, &plan)) return hpml_ctx_status(hpml_comm_ctx(c));
    for (int k = 0; k < hpml_param_count(hpml_comm_ctx(c)) && hpml_comm_rank(c) == 0; k++)
        p->stages[k] = hpml_param_at(hpml_comm_ctx(c), k)->param->stage;
    return hpml_ctx_status(hpml_comm_ctx(c));
}

TEST(a_profile_says_where_to_cut)
{
    static profiled p;
    char      text[512] = "";
    const job j   = job_of(MLP, 2, HPML_PIPE_GPIPE, 2, 8);
    float     accuracy;
    hpml_ctx     *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1, .seed = 4 });
    hpml_trainer *t   = record(ctx, &j, 8, 1);
    hpml_profile_enable(hpml_trainer_graph(t), true);
    train(t, &j, 8, 1, 0, 1, &accuracy);
    p.count = hpml_profile(hpml_trainer_graph(t), p.rows, 64);
    for (int i = 0; i < p.count; i++) p.rows[i].forward_s = p.rows[i].backward_s = 1e-3;
    p.rows[6].backward_s = 1; /* the seventh layer takes longer than all others */
    p.plan = j.plan;
    hpml_launch_desc launch = { .ranks = 2, .timeout = 20, .plan = &j.plan, .ctx = { .threads = 1, .seed = 4 } };
    ENSURE(p.count > 8 && hpml_launch(&launch, cut_by_profile, &p, text, sizeof text) == HPML_OK);
    for (int k = 0; k < 16; k++) ENSURE(p.stages[k] == (k >= 8)); /* eight layers of a weight and a bias, halved */
    p.plan.profile      = p.rows;
    p.plan.profile_rows = p.count;
    ENSURE(hpml_launch(&launch, cut_by_profile, &p, text, sizeof text) == HPML_OK);
    for (int k = 0; k < 16; k++) ENSURE(p.stages[k] == (k >= 12));
    p.plan.profile_rows = 3;
    ENSURE(hpml_launch(&launch, cut_by_profile, &p, text, sizeof text) == HPML_ERR_ARGUMENT);
    ENSURE(strstr(text, "the profile has 3 ops") && strstr(text, "plan.profile"));
    hpml_ctx_free(ctx);
}

/* Every parameter is on one stage only. */
TEST(stages_have_their_own_parameters)
{
    char text[512];
    job  j = job_of(MLP, 4, HPML_PIPE_1F1B, 4, 16);
    ENSURE(pipeline(&j, 4, 4, text) == HPML_OK);
    ENSURE(j.params[0] == 4 && j.params[1] == 4 && j.params[2] == 4 && j.params[3] == 4);
    ENSURE(strstr(j.text, ", pipe 4, 1f1b of 4 micro-batches with a bubble of 43 %"));
}

TEST(accumulate_around_micro_batches)
{
    char text[512];
    job  j = job_of(MLP, 2, HPML_PIPE_1F1B, 2, 8);
    j.accumulate = 2;
    ENSURE(pipeline(&j, 2, 2, text) == HPML_OK);
    ENSURE(j.worst == 0);
}

TEST(short_last_batch)
{
    char text[512];
    job  j = job_of(MLP, 2, HPML_PIPE_GPIPE, 4, 16);
    j.fits = 29;
    ENSURE(pipeline(&j, 2, 1, text) == HPML_OK);
    ENSURE_NEAR(j.worst, 0, 2e-6);
    ENSURE_NEAR(j.outputs, 0, 1e-5);
}

/* Masks belong to samples, so the micro-batches of any cut get those of the whole batch. */
TEST(dropout_is_that_of_one_rank)
{
    char text[512];
    for (int p = 2; p <= 4; p += 2) {
        job j = job_of(DROP, p, HPML_PIPE_1F1B, 4, 16);
        j.fits = 29;
        ENSURE(pipeline(&j, p, 1, text) == HPML_OK);
        ENSURE_NEAR(j.worst, 0, 2e-6);
    }
}

/* A tensor that a later stage reads goes there directly: nothing of it passes through the stages between. */
TEST(skips_bypass_stages)
{
    static const int32_t cuts[3] = { 2, 4, 6 }; /* the first sum is in stage 2, the second one in stage 3 */
    char text[512];
    job  j = job_of(SKIP, 4, HPML_PIPE_GPIPE, 4, 16);
    j.steps = 1;
    j.cut   = cuts;
    ENSURE(pipeline(&j, 4, 4, text) == HPML_OK);
    ENSURE(j.worst == 0);
    const int64_t values = 16 * WIDTH * sizeof(float);
    ENSURE(j.bytes[1] == values);
    ENSURE(j.bytes[2] == values && j.bytes[3] == values);
    for (int batch = 16; batch <= 32; batch *= 2) { /* messages of 256 bytes, which are copied, and larger ones */
        j = job_of(SKIP, 2, HPML_PIPE_INTERLEAVED, 4, batch);
        j.cut   = cuts;
        j.steps = batch < SAMPLES ? 3 : 1; /* later steps would not have the samples of `serial` */
        ENSURE(pipeline(&j, 2, 4, text) == HPML_OK);
        ENSURE_NEAR(j.worst, 0, 1e-6);
    }
}

/* A table that the first and the last stage read has one gradient. */
TEST(tied_parameters)
{
    char text[512];
    for (int p = 2; p <= 4; p += 2) {
        job j = job_of(TIED, p, HPML_PIPE_1F1B, 4, 16);
        ENSURE(pipeline(&j, p, 4, text) == HPML_OK);
        ENSURE_NEAR(j.worst, 0, 1e-6);
        ENSURE_NEAR(j.outputs, 0, 1e-5);
        j = job_of(TIED, p, HPML_PIPE_1F1B, 2, 16);
        j.plan.data = 2;
        ENSURE(pipeline(&j, 2 * p, 1, text) == HPML_OK);
        ENSURE_NEAR(j.worst, 0, 2e-6);
    }
}

/* Running statistics are those of the whole batch, for any number of micro-batches. */
TEST(deferred_batchnorm)
{
    char  text[512];
    float mean[3];
    for (int k = 0; k < 3; k++) {
        job j = job_of(NORM, 2, HPML_PIPE_GPIPE, 1 << k, 16);
        j.steps = 1;
        ENSURE(pipeline(&j, 2, 1, text) == HPML_OK);
        mean[k] = j.mean;
        if (k == 0) ENSURE(j.worst == 0);
    }
    ENSURE(mean[0] != 0);
    ENSURE_NEAR(mean[1], mean[0], 1e-7);
    ENSURE_NEAR(mean[2], mean[0], 1e-7);
}

TEST(data_and_pipe)
{
    char text[512];
    job  j = job_of(MLP, 2, HPML_PIPE_1F1B, 2, 16);
    j.plan.data = 2;
    ENSURE(pipeline(&j, 4, 1, text) == HPML_OK);
    ENSURE_NEAR(j.worst, 0, 2e-6);
    ENSURE_NEAR(j.outputs, 0, 1e-5);
    for (j.fits = 29; j.fits >= 17; j.fits -= 12) { /* 17: one replica has no sample of the last batch */
        ENSURE(pipeline(&j, 4, 1, text) == HPML_OK);
        ENSURE_NEAR(j.worst, 0, 2e-6);
    }
}

/* Replicas of a stage keep parts of its states, gradients and values: also where a short batch has fewer micro-batches
   on a rank, or none, with a table that two stages read, and with norms of all gradients. */
TEST(shards_of_stages)
{
    static const struct { model model; const char *plan; int fits, accumulate; float clip; } cases[] = {
        { MLP, "shard=2", 0, 1, 0 }, { MLP, "shard=3", 29, 1, 0 }, { MLP, "shard=2,schedule=1f1b", 29, 1, 0 },
        { MLP, "shard=2,schedule=1f1b", 17, 1, 0 }, { MLP, "shard=3,schedule=1f1b", 17, 1, 0 },
        { SKIP, "shard=2,schedule=1f1b", 0, 2, 0 }, { SKIP, "shard=3,schedule=1f1b", 0, 2, 0 },
        { MLP, "shard=3,schedule=1f1b", 0, 1, 0.05f }, { MLP, "shard=1,schedule=1f1b", 17, 1, 0 },
        { SKIP, "shard=1,schedule=interleaved", 0, 2, 0 }, { MLP, "shard=1,schedule=zero_bubble", 29, 1, 0.05f },
        { MLP, "shard=3,schedule=1f1b,recompute=1", 29, 1, 0 }, { SKIP, "shard=2,no_overlap=1", 17, 1, 0 },
        { TIED, "shard=1,schedule=1f1b", 0, 1, 0 }, { TIED, "shard=1", 29, 1, 0 }, { TIED, "shard=1", 0, 2, 0.05f },
    };
    char text[512];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        for (int way = 0; way < 4; way++) {
            job j = job_of(cases[i].model, 2, HPML_PIPE_GPIPE, 4, cases[i].accumulate > 1 ? 8 : 16);
            ENSURE(hpml_plan_parse(cases[i].plan, &j.plan, text, sizeof text) == HPML_OK);
            j.plan.data  = 2;
            j.slow       = way > 1;
            j.plan.bucket_bytes = way % 2 ? 1 : 1 << 20;
            j.fits       = cases[i].fits;
            j.accumulate = cases[i].accumulate;
            j.clip       = cases[i].clip;
            ENSURE(pipeline(&j, 4, 1, text) == HPML_OK);
            if (!(j.worst <= 2e-6 && j.outputs <= 1e-5)) printf("    case %d: %g, %g\n", (int)i, j.worst, j.outputs);
            ENSURE(j.worst <= 2e-6 && j.outputs <= 1e-5);
        }
}

/* The norm of all gradients is that of all stages, with a table that two stages have once. */
TEST(clipping_and_norms_of_tensors)
{
    static const hpml_opt optimizers[] = { HPML_OPT_SGD, HPML_OPT_LAMB };
    char text[512];
    for (int k = 0; k < 4; k++) {
        job j = job_of(k < 2 ? MLP : TIED, 2, HPML_PIPE_1F1B, 2, 8);
        j.optimizer = k < 2 ? optimizers[k] : HPML_OPT_SGD;
        j.clip      = 0.05f;
        j.plan.data = k == 3 ? 2 : 0;
        ENSURE(pipeline(&j, k == 3 ? 4 : 2, k == 3 ? 1 : 2, text) == HPML_OK);
        ENSURE_NEAR(j.worst, 0, 2e-6);
    }
}

/* Strategies see the replicas of a stage: two replicas of two stages train as two whole ones do. */
TEST(strategies_between_replicas)
{
    static const char *const plans[] = {
        "bucket_bytes=1,algorithm=central", "no_overlap=1", "shard=1", "shard=2", "codec=bf16", "delayed=1",
        "global_batch=6",
        "strategy=local,period=2", "strategy=block,period=2", "strategy=elastic", "strategy=gossip",
        "codec=onebit,codec.min_elements=16",
    };
    static float two[MOST], four[MOST];
    char         text[512];
    for (size_t i = 0; i < sizeof plans / sizeof plans[0]; i++) {
        job whole = job_of(NORM, 1, HPML_PIPE_GPIPE, 0, 8), cut = job_of(NORM, 2, HPML_PIPE_1F1B, 1, 8);
        whole.plan.data = cut.plan.data = 2;
        whole.fits      = cut.fits = 17;
        whole.values    = two;
        cut.values      = four;
        ENSURE(hpml_plan_parse(plans[i], &whole.plan, text, sizeof text) == HPML_OK);
        ENSURE(hpml_plan_parse(plans[i], &cut.plan, text, sizeof text) == HPML_OK);
        ENSURE(pipeline(&whole, 2, 1, text) == HPML_OK && pipeline(&cut, 4, 1, text) == HPML_OK);
        double worst = 0;
        for (int k = 0; k < MOST; k++) worst = fmax(worst, fabs((double)two[k] - (double)four[k]));
        if (worst > 1e-5) printf("    %s: %g\n", plans[i], worst);
        ENSURE(worst <= 1e-5);
    }
}

/* Segments that are computed again give the same bits, and slots keep less. */
TEST(recomputed_segments)
{
    char text[512];
    job  j = job_of(MLP, 2, HPML_PIPE_GPIPE, 4, 16), less = j;
    less.again = true;
    ENSURE(pipeline(&j, 2, 4, text) == HPML_OK);
    ENSURE(pipeline(&less, 2, 4, text) == HPML_OK);
    ENSURE(less.worst == 0);
    ENSURE(less.planned[0] < j.planned[0] && less.planned[1] < j.planned[1]);
}

/* The activations of a stage are those of its micro-batches in flight. */
TEST(slots_are_the_micro_batches_in_flight)
{
    char text[512];
    job  all = job_of(MLP, 4, HPML_PIPE_GPIPE, 8, 32), few = job_of(MLP, 4, HPML_PIPE_1F1B, 8, 32);
    ENSURE(pipeline(&all, 4, 8, text) == HPML_OK);
    ENSURE(pipeline(&few, 4, 8, text) == HPML_OK);
    for (int r = 0; r < 4; r++) {
        double slot = (double)all.planned[r] / 8;
        ENSURE((double)few.planned[r] > 0.9 * slot * (4 - r) && (double)few.planned[r] < slot * (4 - r) + slot);
    }
}

/* With ZERO_BUBBLE every stage has p of them, from the forward pass to the gradients of weights. */
TEST(slots_until_the_gradients_of_weights)
{
    size_t bytes[4][4];
    char   text[512];
    for (int k = 0; k < 4; k++) { /* 1, 2, 4 and 8 micro-batches of 4 samples */
        job j = job_of(MLP, 4, HPML_PIPE_ZERO_BUBBLE, 1 << k, 4 << k);
        ENSURE(pipeline(&j, 4, 1 << k, text) == HPML_OK);
        memcpy(bytes[k], j.planned, sizeof bytes[k]);
    }
    for (int r = 0; r < 4; r++) {
        ENSURE(bytes[1][r] > bytes[0][r] && bytes[2][r] - bytes[1][r] == 2 * (bytes[1][r] - bytes[0][r]));
        ENSURE(bytes[3][r] == bytes[2][r]);
    }
}

/* Whatever goes on around it: 1F1B and ZERO_BUBBLE train the same bits. */
TEST(zero_bubble_is_1f1b)
{
    static const struct { model model; const char *plan; int fits, accumulate; float clip; bool again; } cases[] = {
        { .model = TIED }, { .model = TIED, .plan = "data=2" }, { .model = SKIP, .clip = 0.05f },
        { .model = NORM, .plan = "data=2,shard=1" }, { .model = DROP, .fits = 29 }, { .model = SKIP, .again = true },
        { .model = MLP, .plan = "data=2", .fits = 17 }, { .model = MLP, .plan = "recompute=1" },
        { .model = NORM, .plan = "data=2,codec=onebit,codec.min_elements=16,bucket_bytes=1" },
        { .model = MLP, .plan = "data=2,strategy=local,period=2", .accumulate = 2 },
    };
    static float values[2][MOST];
    char         text[512];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        for (int k = 0; k < 2; k++) {
            job j = job_of(cases[i].model, 2, k ? HPML_PIPE_ZERO_BUBBLE : HPML_PIPE_1F1B, 4, 16);
            j.fits       = cases[i].fits;
            j.accumulate = cases[i].accumulate;
            j.clip       = cases[i].clip;
            j.again      = cases[i].again;
            j.values     = values[k];
            if (cases[i].plan) ENSURE(hpml_plan_parse(cases[i].plan, &j.plan, text, sizeof text) == HPML_OK);
            ENSURE(pipeline(&j, j.plan.data == 2 ? 4 : 2, 1, text) == HPML_OK);
        }
        if (memcmp(values[0], values[1], sizeof values[0]) != 0) printf("    case %d\n", (int)i);
        ENSURE(memcmp(values[0], values[1], sizeof values[0]) == 0);
    }
}

/* ---- without a flush: versions of the weights ---- */

typedef struct flow {
    job   *j;
    int    stage[32];               /* of each parameter */
    float  values[MOST];            /* of this pipeline in the end, each stage's own */
    bool   same;                    /* all replicas of a stage have the same values */
    float  accuracy[8][16];         /* of the first replica of a stage in each step */
} flow;

static hpml_status flow_main(hpml_comm *c, void *user)
{
    flow         *f   = (flow *)user;
    hpml_ctx     *ctx = hpml_comm_ctx(c);
    const hpml_mesh *m = hpml_comm_mesh(c);
    const int     stage = m->at[HPML_AXIS_PIPE], replica = m->at[HPML_AXIS_DATA], replicas = m->size[HPML_AXIS_DATA];
    result       *mine = (result *)malloc(sizeof *mine);
    hpml_trainer *t   = record(ctx, f->j, f->j->batch / replicas, 1);
    hpml_distributed *d = hpml_distribute(t, c, NULL);
    double        differ = 0;
    float         accuracy = 0;
    if (!d) return hpml_ctx_status(ctx);
    job once = *f->j;
    once.steps = 1;
    for (int s = 0; s < f->j->steps; s++) { /* evaluations between the steps do not disturb micro-batches in flight */
        once.first = s;
        train(t, &once, f->j->batch, 1, replica, replicas, &accuracy);
        if (replica == 0 && s < 16) f->accuracy[stage][s] = accuracy;
        if (s % 3 == 2) judge(t, f->j, (result *)memset(mine, 0, sizeof *mine));
    }
    hpml_distribute_finish(d);
    hpml_memory planned;
    hpml_graph_memory(hpml_trainer_graph(t), &planned);
    f->j->planned[hpml_comm_rank(c)] = planned.optimizer;
    for (int k = 0, at = 0; k < hpml_param_count(ctx); k++) {
        hpml_tensor *p = hpml_param_at(ctx, k);
        size_t       n = (size_t)hpml_tensor_count(p);
        if (hpml_comm_rank(c) == 0) f->stage[k] = p->param->stage;
        if (p->param->stage == stage && replica == 0) memcpy(f->values + at, p->data, n * sizeof(float));
        if (p->param->stage == stage && replicas > 1) {
            memcpy(mine->values, p->data, n * sizeof(float));
            hpml_broadcast(m->axis[HPML_AXIS_DATA], mine->values, n * sizeof(float), 0);
            differ += memcmp(mine->values, p->data, n * sizeof(float)) != 0;
        }
        at += (int)n;
    }
    free(mine);
    hpml_allreduce(c, &differ, 1, &(hpml_allreduce_desc){ .element = HPML_ELEMENT_F64 });
    if (hpml_comm_rank(c) == 0) f->same = differ == 0;
    return hpml_ctx_status(ctx);
}

static bool flows(flow *f)
{
    char        text[512];
    int         ranks  = f->j->plan.pipe * (f->j->plan.data > 1 ? f->j->plan.data : 1);
    hpml_status status = hpml_launch(&(hpml_launch_desc){ .ranks = ranks, .timeout = 20, .plan = &f->j->plan,
                                                          .ctx = { .threads = 1, .seed = 4 } },
                                     flow_main, f, text, sizeof text);
    if (status != HPML_OK) printf("    %s\n", text);
    return status == HPML_OK;
}

static float history[64][MOST]; /* the parameters after each update */
static int   now;               /* updates until now */

/* Copies all parameters from or to a row of the history; from: each of its version. */
static void copy_params(hpml_ctx *ctx, const flow *f, int stages, bool vertical, bool save)
{
    for (int k = 0, place = 0; k < hpml_param_count(ctx); k++) {
        hpml_tensor *p     = hpml_param_at(ctx, k);
        size_t       size  = (size_t)hpml_tensor_count(p) * sizeof(float);
        int          delay = vertical ? stages - 1 : stages - 1 - f->stage[k];
        if (stages == 0) delay = 0;
        if (save) memcpy(history[now] + place, p->data, size);
        else memcpy(p->data, history[now > delay ? now - delay : 0] + place, size);
        place += (int)hpml_tensor_count(p);
    }
}

static hpml_status update_newest(void *user, hpml_trainer *t, const hpml_moment *at)
{
    hpml_ctx *ctx = hpml_trainer_settings(t)->input->ctx;
    (void)at;
    copy_params(ctx, (const flow *)user, 0, false, false);
    hpml_status status = hpml_trainer_update_inner(t);
    now++;
    copy_params(ctx, (const flow *)user, 0, false, true);
    return status;
}

/* One rank: the gradient of batch i at the weights after i - delay updates is the i-th update; delay: p - 1 - stage. */
static double stale(flow *f, int stages, bool vertical)
{
    job           one = *f->j;
    hpml_hooks    hooks = { .user = f, .update = update_newest };
    float         x[SAMPLES * IN];
    int32_t       y[SAMPLES];
    double        worst = 0;
    hpml_ctx     *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1, .seed = 4 });
    hpml_trainer *t   = record(ctx, &one, one.batch, 1);
    hpml_trainer_attach(t, &hooks);
    draw(x, y, false);
    now = 0;
    copy_params(ctx, f, 0, false, true);
    for (int i = 0; i < steps_of(&one); i++) {
        int at = i * 4 % SAMPLES;
        if (at + one.batch > SAMPLES) at = 0;
        copy_params(ctx, f, stages, vertical, false);
        hpml_trainer_step(t, x + at * IN, y + at, one.batch, NULL);
    }
    for (int64_t e = 0; e < hpml_param_total(ctx); e++)
        worst = fmax(worst, fabs((double)f->values[e] - (double)history[now][e]));
    if (hpml_ctx_status(ctx) != HPML_OK || now != steps_of(&one)) worst = HUGE_VAL;
    hpml_ctx_free(ctx);
    return worst;
}

TEST(stash_is_one_rank_with_delays)
{
    static const int stages[4] = { 2, 4, 4, 2 }, steps[4] = { 12, 2, 12, 12 };
    for (int kind = HPML_PIPE_STASH; kind <= HPML_PIPE_VERTICAL; kind += HPML_PIPE_VERTICAL - HPML_PIPE_STASH)
        for (int k = 0; k < 8; k++) {
            job  j = job_of(MLP, stages[k % 4], (hpml_pipe_kind)kind, 0, 4);
            flow f = { 0 };
            j.plan.data = k % 4 == 3 ? 2 : 1; /* and so two replicas of each stage */
            j.steps     = steps[k % 4];
            j.optimizer = k < 4 ? HPML_OPT_SGD : HPML_OPT_ADAM;
            f.j = &j;
            ENSURE(flows(&f) && f.same);
            for (int stage = 0, last = j.plan.pipe - 1; stage <= last; stage++)
                for (int s = 0; s < j.steps; s++) { /* a stage has that of the batch which it has passed back */
                    const float *all = f.accuracy[last];
                    ENSURE(f.accuracy[stage][s] == (s < last - stage ? -1 : all[s - (last - stage)]));
                    ENSURE(all[s] >= 0 && all[s] <= 1);
                }
            ENSURE_NEAR(stale(&f, j.plan.pipe, kind == HPML_PIPE_VERTICAL), 0, j.plan.data == 2 ? 2e-6 : 1e-6);
        }
}

/* An optimizer of norms gets those of whole tensors, of the ranks of one stage: every stage steps at its own time. */
TEST(norms_of_stages_without_a_flush)
{
    for (int k = 0; k < 2; k++) {
        job  j = job_of(MLP, 2, HPML_PIPE_STASH, 0, 8);
        flow f = { 0 };
        j.plan.data  = 2;
        j.plan.shard = k;
        j.optimizer  = HPML_OPT_LAMB;
        j.steps      = 7;
        f.j          = &j;
        ENSURE(flows(&f) && f.same);
        ENSURE_NEAR(stale(&f, 2, false), 0, 1e-5);
    }
}

/* Replicas that each keep a part of the states train to the bits of replicas that keep all of them. */
TEST(states_of_stages_without_a_flush_in_parts)
{
    static flow whole, parts;
    for (int k = 0; k < 4; k++) {
        job j = job_of(k % 2 ? NORM : MLP, 2, k < 2 ? HPML_PIPE_STASH : HPML_PIPE_VERTICAL, 0, 8), cut;
        j.plan.data      = 2;
        j.plan.algorithm = HPML_RING;
        j.optimizer      = k % 2 ? HPML_OPT_SGD : HPML_OPT_ADAM;
        j.steps          = 7;
        j.fits           = k == 3 ? 17 : 0;
        cut            = j;
        cut.plan.shard = 1;
        whole.j = &j;
        parts.j = &cut;
        ENSURE(flows(&whole) && flows(&parts) && whole.same && parts.same);
        ENSURE(memcmp(whole.values, parts.values, sizeof whole.values) == 0);
        ENSURE(cut.planned[0] < j.planned[0] && cut.planned[3] < j.planned[3]);
    }
}

/* Running statistics are those of all replicas; a last batch that leaves one replica without samples. */
TEST(replicas_of_stages_without_a_flush_stay_equal)
{
    for (int fits = 0; fits <= 17; fits += 17) {
        job  j = job_of(NORM, 2, HPML_PIPE_STASH, 0, 8);
        flow f = { 0 };
        f.j = &j;
        j.plan.data = 2;
        j.steps     = 5;
        j.fits      = fits;
        ENSURE(flows(&f) && f.same);
    }
}

/* ---- in virtual time ---- */

typedef struct timed { hpml_plan plan; int layers, batch; double seconds; int fails; bool frees; } timed;

static hpml_status work_forward(const hpml_run *run, hpml_node *n)
{
    hpml_comm *c = (hpml_comm *)n->attr.custom->user;
    memcpy(n->out->data, n->src[0]->data, (size_t)hpml_tensor_count(n->out) * sizeof(float));
    hpml_comm_compute(c, 1e-3 * (double)n->out->shape[0]);
    if (run->step == 1 && n->index < 0) return HPML_ERR_STATE;
    return HPML_OK;
}
/* The gradients of the input and of the parameter, which are computed in one call or in two, take equally long. */
static hpml_status work_backward(const hpml_run *run, hpml_node *n)
{
    for (int s = 0; s < 2; s++)
        if (n->src[s]->grad) hpml_comm_compute((hpml_comm *)n->attr.custom->user, 1e-3 * (double)n->out->shape[0]);
    hpml_node_give(run, n, 0, n->out->grad);
    return HPML_OK;
}
static hpml_status fails_forward(const hpml_run *run, hpml_node *n)
{
    if (run->step > 0) return hpml_ctx_fail(run->ctx, HPML_ERR_STATE, "layer of stage 1 has failed");
    memcpy(n->out->data, n->src[0]->data, (size_t)hpml_tensor_count(n->out) * sizeof(float));
    return HPML_OK;
}
static hpml_status fails_backward(const hpml_run *run, hpml_node *n)
{
    hpml_node_give(run, n, 0, n->out->grad);
    return HPML_OK;
}

static hpml_status timed_main(hpml_comm *c, void *user)
{
    timed         *j    = (timed *)user;
    hpml_ctx      *ctx  = hpml_comm_ctx(c);
    hpml_custom    work = { .name = "work", .forward = work_forward, .backward = work_backward, .user = c,
                            .flops = 1e9, .halves = true };
    float          x[64 * IN] = { 0 };
    int32_t        y[64] = { 0 };
    hpml_step_info info;
    hpml_tensor   *in = hpml_input_2d(ctx, j->batch, IN), *src[2] = { in, NULL };
    for (int i = 0; i < j->layers; i++) {
        src[0] = layer(src[0], i < j->layers - 1 ? IN : OUT, HPML_ACT_NONE);
        src[1] = hpml_param_create(ctx, &(hpml_param_desc){ .ndim = 1, .shape = { 1 }, .init = HPML_INIT_ONES });
        if (j->fails && i == j->layers / 2) {
            work.forward  = fails_forward;
            work.backward = fails_backward;
        }
        src[0] = hpml_custom_op(src, 2, &work);
    }
    hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = in, .output = src[0], .lr = 0.1f });
    hpml_distributed *d = hpml_distribute(t, c, NULL);
    if (!d) return hpml_ctx_status(ctx);
    double start = hpml_comm_now(c);
    for (int s = 0; s < 2; s++)
        if (hpml_trainer_step(t, x, y, j->batch, &info) != HPML_OK) return hpml_ctx_status(ctx);
    hpml_barrier(c);
    if (hpml_comm_rank(c) == 0) j->seconds = (hpml_comm_now(c) - start) / 2;
    if (j->frees) hpml_distribute_free(d);
    return hpml_ctx_status(ctx);
}

TEST(bubble_in_virtual_time)
{
    static const hpml_pipe_kind kinds[] = { HPML_PIPE_GPIPE, HPML_PIPE_1F1B, HPML_PIPE_INTERLEAVED,
                                            HPML_PIPE_ZERO_BUBBLE };
    char text[512];
    for (int k = 0; k < 4; k++)
        for (int m = 4; m <= 16; m *= 2) {
            timed          j = { .layers = 8, .batch = 16 };
            hpml_pipe_desc d = { .kind = kinds[k], .stages = 4, .micro = m };
            j.plan.pipe     = 4;
            j.plan.schedule = kinds[k];
            j.plan.micro    = m;
            ENSURE(hpml_launch(&(hpml_launch_desc){ .transport = HPML_TRANSPORT_CLOCK, .ranks = 4, .plan = &j.plan,
                                                    .ctx.threads = 1 }, timed_main, &j, text, sizeof text) == HPML_OK);
            ENSURE_NEAR(1 - 3e-3 * 16 * 8 / 4 / j.seconds, hpml_pipe_bubble(&d), 1e-3);
        }
}

/* Links that take time: a step takes as long as the simulation says. */
TEST(simulation_is_the_clock)
{
    static const hpml_pipe_kind kinds[] = { HPML_PIPE_1F1B, HPML_PIPE_ZERO_BUBBLE };
    char           text[512];
    hpml_network   slow = { .inside = { 2e-3, 1e6 } };
    const int64_t  bytes[4] = { 2 * IN * 4, 2 * IN * 4, 2 * IN * 4, 0 };
    const double   forward[4] = { 4e-3, 4e-3, 4e-3, 4e-3 };
    double         before = HUGE_VAL;
    for (int k = 0; k < 2; k++) {
        timed          j = { .layers = 8, .batch = 16 };
        hpml_pipe_desc d = { .kind = kinds[k], .stages = 4, .micro = 8, .forward_s = forward, .bytes = bytes };
        hpml_pipe_simulation r;
        d.network       = slow;
        j.plan.pipe     = 4;
        j.plan.schedule = kinds[k];
        j.plan.micro    = 8;
        ENSURE(hpml_launch(&(hpml_launch_desc){ .transport = HPML_TRANSPORT_CLOCK, .ranks = 4, .plan = &j.plan,
                                                .network = slow, .ctx.threads = 1 }, timed_main, &j, text,
                           sizeof text) == HPML_OK);
        ENSURE(hpml_pipe_simulate(&d, &r, NULL, 0, text, sizeof text) == HPML_OK);
        ENSURE(j.seconds >= r.step_s);
        ENSURE(j.seconds < r.step_s + 3 * 4 * 2e-3); /* and a broadcast of the loss, a barrier */
        ENSURE(j.seconds < before);
        before = j.seconds;
    }
}

TEST(a_stage_that_fails_is_named)
{
    char  text[512];
    timed j = { .layers = 8, .batch = 16, .fails = 1 };
    j.plan.pipe     = 4;
    j.plan.schedule = HPML_PIPE_1F1B;
    ENSURE(hpml_launch(&(hpml_launch_desc){ .ranks = 4, .timeout = 20, .plan = &j.plan, .ctx.threads = 1 }, timed_main,
                       &j, text, sizeof text) != HPML_OK);
    ENSURE(strstr(text, "layer of stage 1 has failed"));
}

/* A stage that ends after another one's failure leaves no message that points to its memory. */
typedef struct failing { int forwards, blocks; bool freed; } failing; /* atomic: of rank 0 */

static void *wiped_alloc(size_t bytes, size_t align, void *user)
{
    void *p = NULL;
    __atomic_add_fetch(&((failing *)user)->blocks, 1, __ATOMIC_ACQ_REL);
    return posix_memalign(&p, align, bytes) == 0 ? p : NULL;
}
static void wiped_free(void *p, size_t bytes, void *user)
{
    failing *f = (failing *)user;
    if (!p) return;
    memset(p, 0xdd, bytes);
    __asm__ __volatile__("" : : "r"(p) : "memory"); /* else compilers leave memset out before free */
    free(p);
    if (__atomic_sub_fetch(&f->blocks, 1, __ATOMIC_ACQ_REL) == 0) __atomic_store_n(&f->freed, true, __ATOMIC_RELEASE);
}
static void place_failing(hpml_ctx_desc *ctx, int rank, void *user)
{
    if (rank == 0) ctx->allocator = (hpml_allocator){ wiped_alloc, wiped_free, user };
}
static hpml_status counts_forward(const hpml_run *run, hpml_node *n)
{
    (void)run;
    memcpy(n->out->data, n->src[0]->data, (size_t)hpml_tensor_count(n->out) * sizeof(float));
    __atomic_add_fetch(&((failing *)n->attr.custom->user)->forwards, 1, __ATOMIC_ACQ_REL);
    return HPML_OK;
}

static hpml_status failing_main(hpml_comm *c, void *user)
{
    static const int32_t cut[1] = { 2 };
    failing       *f   = (failing *)user;
    hpml_ctx      *ctx = hpml_comm_ctx(c);
    hpml_custom    counts = { .name = "counts", .forward = counts_forward, .backward = fails_backward, .user = f };
    hpml_plan      plan = { .pipe = 2, .micro = 2, .cut = cut };
    float          x[SAMPLES * IN] = { 0 };
    int32_t        y[SAMPLES] = { 0 };
    hpml_message   m;
    hpml_tensor   *in = hpml_input_2d(ctx, SAMPLES, IN), *src[1] = { layer(in, IN, HPML_ACT_NONE) };
    hpml_tensor   *out = layer(layer(hpml_custom_op(src, 1, &counts), IN, HPML_ACT_NONE), OUT, HPML_ACT_NONE);
    hpml_trainer  *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = in, .output = out, .lr = 0.1f });
    if (!hpml_distribute(t, c, &plan)) return hpml_ctx_status(ctx);
    if (hpml_comm_rank(c) == 0) return hpml_trainer_step(t, x, y, SAMPLES, NULL);
    hpml_comm *stages = hpml_comm_mesh(c)->axis[HPML_AXIS_PIPE];
    hpml_irecv(stages, 0, 99, x, sizeof x[0], &m);
    while (__atomic_load_n(&f->forwards, __ATOMIC_ACQUIRE) < 2) sched_yield(); /* then rank 0 has sent values */
    hpml_ctx_fail(ctx, HPML_ERR_STATE, "stage 1 has failed");
    hpml_barrier(c); /* tells rank 0 */
    while (!__atomic_load_n(&f->freed, __ATOMIC_ACQUIRE)) sched_yield();
    hpml_test(stages, &m); /* looks through all messages that have been sent to this rank */
    return hpml_ctx_status(ctx);
}

TEST(a_stage_that_ends_leaves_no_message)
{
    failing   f = { 0 };
    hpml_plan plan = { .pipe = 2, .micro = 2 };
    char      text[512];
    ENSURE(hpml_launch(&(hpml_launch_desc){ .ranks = 2, .timeout = 20, .plan = &plan, .place = place_failing,
                                            .ctx.threads = 1 }, failing_main, &f, text, sizeof text) != HPML_OK);
    if (!strstr(text, "stage 1 has failed")) printf("    %s\n", text);
    ENSURE(strstr(text, "stage 1 has failed"));
}

/* Without hpml_distribute_finish gradients are left in flight that no stage receives. */
TEST(a_training_without_a_flush_may_end_without_finish)
{
    for (int i = 0; i < 4; i++) {
        char  text[512];
        timed j = { .layers = 8, .batch = 16, .frees = i % 2 };
        j.plan.pipe     = 4;
        j.plan.schedule = i < 2 ? HPML_PIPE_STASH : HPML_PIPE_VERTICAL;
        hpml_launch_desc l = { .ranks = 4, .timeout = 20, .plan = &j.plan, .ctx.threads = 1 };
        const hpml_status status = hpml_launch(&l, timed_main, &j, text, sizeof text);
        if (status != HPML_OK) printf("    %s\n", text);
        ENSURE(status == HPML_OK);
    }
}

TEST(refusals)
{
    static const struct { const char *plan, *says; int batch; } wrong[] = {
        { "pipe=2,micro=17", "micro", 16 },
        { "pipe=2,schedule=stash,delayed=1", "stash", 16 },
        { "pipe=2,schedule=stash,micro=4", "micro", 16 },
        { "pipe=2,chunks=2", "chunks", 16 },
        { "pipe=2,sync_batchnorm=1", "sync_batchnorm", 16 },
        { "schedule=stash", "schedule", 16 },
        { "pipe=2,schedule=interleaved,shard=2", "take schedule gpipe or 1f1b, or shard=1", 16 },
        { "pipe=2,schedule=zero_bubble,shard=3", "take schedule gpipe or 1f1b, or shard=1", 16 },
        { "pipe=2,schedule=stash,shard=3", "take schedule gpipe or 1f1b, or shard=1", 16 },
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        hpml_plan       plan = { 0 };
        hpml_plan_facts facts = { .ranks = 2, .batch = wrong[i].batch };
        char            why[768];
        ENSURE(hpml_plan_parse(wrong[i].plan, &plan, why, sizeof why) == HPML_OK);
        ENSURE(hpml_plan_check(&plan, &facts, why, sizeof why) != HPML_OK);
        if (!strstr(why, wrong[i].says)) printf("    %s\n", why);
        ENSURE(strstr(why, wrong[i].says));
    }
}

TEST(cuts_that_are_not_possible)
{
    static const int32_t cuts[2][1] = { { 0 }, { 900 } };
    char text[512];
    for (int k = 0; k < 2; k++) {
        job j = job_of(MLP, 2, HPML_PIPE_GPIPE, 2, 8);
        j.cut    = cuts[k];
        expected = serial(&j, 1);
        ENSURE(hpml_launch(&(hpml_launch_desc){ .ranks = 2, .timeout = 20, .plan = &j.plan, .ctx = { .threads = 1 } },
                           rank_main, &j, text, sizeof text) != HPML_OK);
        free(expected);
        ENSURE(strstr(text, "plan.cut"));
    }
}
