/* What you learn: a model cut into stages, and how the order of micro-batches decides how long the stages wait.
   cc -O2 examples/14_pipeline.c -o pipeline -lm -lpthread && ./pipeline      Difficulty 3 of 4.
   Four ranks in virtual time train an MLP of 8 layers on digits; each layer takes 1 ms for 8 samples, and 2 ms back.
   The program is the same for every schedule: the plan cuts the model.
   prints for each schedule its drawing and a line: time of a step, bubble (the share of time for which stages wait)
   measured and by formula, micro-batches in flight on the first and the last stage, bytes sent, loss. Draws
   build/pipeline_NAME.svg.
   ./pipeline 1f1b stash      only these; HPML_PLAN="pipe=2,schedule=interleaved,micro=4" ./pipeline: one plan
   --uneven: layer i takes i + 1 ms, and hpml_pipe_cut finds the best cuts; --tasks: lists the tasks of each stage;
   --trace FILE: the timeline of the first one, for Perfetto; --json: an object a line; --help lists all options */
#define HPML_IMPLEMENTATION
#include "../hpml_comm.h"
#include "digits.h"
#include "options.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { BATCH = 64, LEARN = 1024, LAYERS = 8, WIDTH = 32, SPANS = 4096 };

static uint8_t images[LEARN * DIGITS_PIXELS];
static int32_t labels[LEARN];

typedef struct trial {
    hpml_plan   plan;
    bool        uneven;
    const char *trace; /* where to save the timeline; NULL: nowhere */
    int         ranks, steps;
    double      seconds, loss;
    int64_t     bytes;
} trial;

typedef struct work { hpml_comm *c; double seconds; } work; /* of the forward pass of a sample */

/* An op that computes nothing, but takes virtual time: forward, and backward as long for the gradient of its input and
   for that of its parameter, which schedule zero_bubble computes in a second call, later. */
static hpml_status work_forward(const hpml_run *run, hpml_node *n)
{
    const work *w = (const work *)n->attr.custom->user;
    (void)run;
    memcpy(n->out->data, n->src[0]->data, (size_t)hpml_tensor_count(n->out) * sizeof(float));
    hpml_comm_compute(w->c, w->seconds * (double)n->out->shape[0]);
    return HPML_OK;
}
static hpml_status work_backward(const hpml_run *run, hpml_node *n)
{
    const work *w = (const work *)n->attr.custom->user;
    hpml_node_give(run, n, 0, n->out->grad);
    for (int i = 0; i < 2; i++)
        if (n->src[i]->grad) hpml_comm_compute(w->c, w->seconds * (double)n->out->shape[0]);
    return HPML_OK;
}

static hpml_tensor *layer(work *w, hpml_tensor *x, int width, hpml_act act)
{
    const hpml_custom op = { .name = "work", .forward = work_forward, .backward = work_backward, .user = w,
                             .flops = 1e9, .halves = true };
    hpml_linear_desc  d  = { .activation = act };
    hpml_param_desc   p  = { .ndim = 1, .shape = { 1 }, .init = HPML_INIT_ONES };
    hpml_tensor      *src[2] = { hpml_linear(x, width, &d), hpml_param_create(x->ctx, &p) };
    return hpml_custom_op(src, 2, &op);
}

/* Seconds of layer i for a sample, forward: 1 ms for 8 samples. Uneven layers take as long together. */
static double seconds_of(const trial *j, int i) { return 1e-3 / 8 * (j->uneven ? 2 * (i + 1.0) / (LAYERS + 1) : 1); }

/* Finds the cuts with which the slowest piece is as fast as possible. A layer is two ops, so its first op is 2 i. */
static const int32_t *cuts_of(const trial *j, int pieces)
{
    static int32_t     cut[LAYERS];
    double             seconds[LAYERS];
    hpml_pipe_stage    stages[LAYERS];
    hpml_pipe_cut_desc d = { .layers = LAYERS, .ranks = pieces, .seconds = seconds };
    for (int i = 0; i < LAYERS; i++) seconds[i] = seconds_of(j, i);
    if (pieces > LAYERS || hpml_pipe_cut(&d, stages, NULL, NULL, 0) < 0) return NULL;
    for (int q = 1; q < pieces; q++) cut[q - 1] = 2 * stages[q].first;
    return cut;
}

/* The program: a model, a trainer, a loop. Nothing in it speaks of stages. */
static hpml_status train(hpml_comm *c, void *user)
{
    static const int64_t shape[1] = { DIGITS_PIXELS };
    trial               *j   = (trial *)user;
    hpml_ctx            *ctx = hpml_comm_ctx(c);
    hpml_step_info       info = { 0 };
    hpml_counters        sent = { 0 };
    float                x[BATCH * DIGITS_PIXELS];
    work                 w[LAYERS];
    hpml_tensor         *in = hpml_input_2d(ctx, BATCH, shape[0]), *h = in;           /* (B, 784) */
    for (int i = 0; i < LAYERS; i++) {
        w[i] = (work){ c, seconds_of(j, i) };
        if (i < LAYERS - 1) h = layer(&w[i], h, WIDTH, HPML_ACT_TANH);                /* (B, 32) */
        else h = layer(&w[i], h, 10, HPML_ACT_NONE);                                  /* (B, 10) */
    }
    hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = in, .output = h, .lr = 0.1f,
                                                                     .momentum = 0.5f });
    hpml_distributed *d = hpml_distribute(t, c, NULL);
    const hpml_mesh  *m = hpml_comm_mesh(c);
    if (!d) return hpml_ctx_status(ctx);
    if (j->trace) hpml_comm_trace_start(c, NULL);
    double start = hpml_comm_now(c);
    for (int s = 0; s < j->steps; s++) {
        const int first = s * BATCH % LEARN;
        for (int i = 0; i < BATCH * DIGITS_PIXELS; i++) x[i] = (float)images[first * DIGITS_PIXELS + i] / 255;
        if (hpml_trainer_step(t, x, labels + first, BATCH, &info) != HPML_OK) return hpml_ctx_status(ctx);
    }
    hpml_distribute_finish(d);
    hpml_barrier(c);
    const double seconds = (hpml_comm_now(c) - start) / j->steps;
    if (j->trace) hpml_comm_trace_save(c, j->trace);
    if (m && m->axis[HPML_AXIS_PIPE]) hpml_comm_counters(m->axis[HPML_AXIS_PIPE], &sent);
    hpml_allreduce(c, &sent.bytes, 1, &(hpml_allreduce_desc){ .element = HPML_ELEMENT_I64 });
    if (hpml_comm_rank(c) != 0) return hpml_ctx_status(ctx);
    j->seconds = seconds;
    j->bytes   = sent.bytes / j->steps;
    j->loss    = (double)info.loss;
    if (m) j->plan.pipe = m->size[HPML_AXIS_PIPE];
    return hpml_ctx_status(ctx);
}

/* The pipeline of a plan, for the functions that count, draw and simulate its moves. */
static hpml_pipe_desc pipe_of(const trial *j)
{
    hpml_pipe_desc d = { .kind = j->plan.schedule, .stages = j->plan.pipe, .chunks = j->plan.chunks };
    d.micro = j->plan.micro > 0 ? j->plan.micro : 4 * d.stages;
    if (d.kind == HPML_PIPE_STASH || d.kind == HPML_PIPE_VERTICAL) d.micro = j->steps;
    return d;
}

static int slots_of(const hpml_pipe_desc *d, int stage)
{
    int slots = 0;
    for (int c = 0; hpml_pipe_slots(d, stage, c) > 0; c++) slots += hpml_pipe_slots(d, stage, c);
    return slots;
}

/* Lists the tasks of each stage: F0 is the forward pass of micro-batch 0, B its backward pass, W of weights alone. */
static void list(const hpml_pipe_desc *d)
{
    hpml_pipe_task t;
    for (int r = 0; r < d->stages; r++) {
        printf("stage %d keeps %d version%s:", r, hpml_pipe_versions(d, r), hpml_pipe_versions(d, r) > 1 ? "s" : "");
        for (int k = 0; hpml_pipe_move(d, r, k, &t); k++)
            printf("%s%c%d", k % 16 ? " " : "\n  ", "FBBWU"[t.work], t.micro);
        printf("\n");
    }
}

/* Draws the moves as text and as build/pipeline_NAME.svg. */
static bool draw(const hpml_pipe_desc *d, hpml_pipe_simulation *s, bool quiet)
{
    static hpml_pipe_span spans[SPANS];
    static char           text[1 << 20];
    char                  path[64], title[128];
    if (hpml_pipe_simulate(d, s, spans, SPANS, text, sizeof text) != HPML_OK) return false;
    int count = s->tasks < SPANS ? s->tasks : SPANS;
    if (!quiet) {
        hpml_pipe_text(spans, count, 72, text, sizeof text);
        printf("%s: %d stages, %d micro-batches\n%s", hpml_pipe_name(d->kind), d->stages, d->micro, text);
    }
    snprintf(path, sizeof path, "build/pipeline_%s.svg", hpml_pipe_name(d->kind));
    snprintf(title, sizeof title, "%s, %d stages, %d micro-batches: bubble %.1f %%", hpml_pipe_name(d->kind), d->stages,
             d->micro, 100 * s->bubble);
    FILE *f = fopen(path, "w");
    if (!f) return false;
    hpml_pipe_svg(spans, count, title, text, sizeof text);
    fputs(text, f);
    return fclose(f) == 0;
}

static void print(const trial *j, const hpml_pipe_desc *d, double bubble, double formula, bool json)
{
    if (json)
        printf("{\"schedule\": \"%s\", \"stages\": %d, \"micro\": %d, \"step_seconds\": %.6f, \"bubble\": %.6f, "
               "\"formula\": %.6f, \"in_flight_first\": %d, \"in_flight_last\": %d, \"bytes_sent\": %lld, "
               "\"loss\": %.4f}\n", hpml_pipe_name(d->kind), d->stages, d->micro, j->seconds, bubble, formula,
               slots_of(d, 0), slots_of(d, d->stages - 1), (long long)j->bytes, j->loss);
    else
        printf("%.1f ms a step, bubble %.2f %% (formula %.2f %%), %d to %d in flight\n", 1e3 * j->seconds, 100 * bubble,
               100 * formula, slots_of(d, 0), slots_of(d, d->stages - 1));
    if (!json) printf("%lld bytes a step, loss %.3f after %d steps\n\n", (long long)j->bytes, j->loss, j->steps);
    fflush(stdout);
}

static bool run(trial *j, bool json, bool environment, bool tasks)
{
    char                 why[768];
    hpml_pipe_simulation s;
    hpml_launch_desc     l = { .transport = HPML_TRANSPORT_CLOCK, .ranks = j->ranks, .ctx = { .seed = 1, .threads = 1 },
                               .plan = environment ? NULL : &j->plan };
    if (environment && hpml_plan_parse(getenv("HPML_PLAN"), &j->plan, why, sizeof why) != HPML_OK)
        return fprintf(stderr, "%s\n", why), false;
    hpml_pipe_desc d = pipe_of(j);
    l.ranks = d.stages;
    if (tasks) list(&d);
    if (j->uneven) j->plan.cut = cuts_of(j, d.stages * (d.kind == HPML_PIPE_INTERLEAVED ? 2 : 1));
    if (hpml_launch(&l, train, j, why, sizeof why) != HPML_OK)
        return fprintf(stderr, "%s\n", why), false;
    if (!draw(&d, &s, json)) return fprintf(stderr, "cannot draw into build/\n"), false;
    double formula = hpml_pipe_bubble(&d), work = 3e-3 / 8 * BATCH * LAYERS / d.stages; /* seconds of a stage's step */
    if (d.kind == HPML_PIPE_STASH || d.kind == HPML_PIPE_VERTICAL)
        formula = (d.stages - 1.0) / (j->steps + d.stages - 1); /* the pipeline is filled and emptied once */
    print(j, &d, 1 - work / j->seconds, formula, json);
    return true;
}

int main(int argc, char **argv)
{
    int64_t      stages = 4, micro = 8, steps = 16;
    int          json = 0, uneven = 0, tasks = 0;
    const char  *trace = NULL;
    option_words only = { { NULL }, 0 };
    const option table[] = {
        { "SCHEDULE", OPTION_WORDS, &only, NULL, "gpipe, 1f1b, ...: only these" },
        { "--stages", OPTION_COUNT, &stages, "N", "ranks of the pipeline (4)" },
        { "--micro", OPTION_COUNT, &micro, "N", "micro-batches of a batch of 64 samples (8)" },
        { "--steps", OPTION_COUNT, &steps, "N", "steps of training (16)" },
        { "--uneven", OPTION_FLAG, &uneven, NULL, "layer i takes i + 1 ms; the best cuts are searched" },
        { "--tasks", OPTION_FLAG, &tasks, NULL, "lists the tasks of each stage" },
        { "--trace", OPTION_TEXT, &trace, "FILE", "saves the timeline of the first schedule" },
        { "--json", OPTION_FLAG, &json, NULL, "an object a line" },
    };
    int      done = options_read("Trains a model that is cut into stages, with several schedules.", table,
                                 (int)(sizeof table / sizeof table[0]), argc, argv);
    uint8_t *y = (uint8_t *)malloc(LEARN);
    bool     environment = getenv("HPML_PLAN") != NULL, good = y != NULL;
    if (done || !y) return free(y), done == 1 ? 0 : 2;
    digits_fill(1, 0, LEARN, images, y);
    for (int i = 0; i < LEARN; i++) labels[i] = y[i];
    free(y);
    mkdir("build", 0777);
    for (int k = 0, first = 1; k < HPML_PIPE_COUNT; k++) {
        trial j = { .ranks = (int)stages, .steps = (int)steps, .trace = first ? trace : NULL };
        bool  wanted = only.count == 0 || environment;
        for (int i = 0; i < only.count; i++)
            wanted = wanted || strcmp(only.word[i], hpml_pipe_name((hpml_pipe_kind)k)) == 0;
        if (!wanted) continue;
        j.plan.pipe     = (int32_t)stages;
        j.plan.schedule = (hpml_pipe_kind)k;
        j.plan.micro    = k == HPML_PIPE_STASH || k == HPML_PIPE_VERTICAL ? 0 : (int32_t)micro;
        j.uneven        = uneven;
        good  = run(&j, json, environment, tasks) && good;
        first = 0;
        if (environment) break;
    }
    return !good;
}
