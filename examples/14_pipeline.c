/* What you learn: a model cut into stages, and how the order of micro-batches decides how long the stages wait.
   cc -O2 examples/14_pipeline.c -o pipeline -lm -lpthread && ./pipeline      Difficulty 3 of 4.
   Four ranks in virtual time train an MLP of 8 layers on digits; each layer takes 1 ms for 8 samples, and 2 ms back. The
   program is the same for every schedule: the plan cuts the model.
   prints for each schedule its drawing and a line: time of a step, bubble (the share of time for which stages wait)
   measured and by formula, micro-batches in flight on the first and the last stage, bytes sent, loss. Draws
   build/pipeline_NAME.svg.
   ./pipeline 1f1b stash      only these; HPML_PLAN="pipe=2,schedule=interleaved,micro=4" ./pipeline: one plan
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
    const char *trace; /* where to save the timeline; NULL: nowhere */
    int         ranks, steps;
    double      seconds, first_loss, loss;
    int64_t     bytes;
} trial;

/* An op that computes nothing, but takes virtual time: 1 ms for 8 samples, and twice as long in the backward pass. */
static hpml_status work_forward(const hpml_run *run, hpml_node *n)
{
    (void)run;
    memcpy(n->out->data, n->src[0]->data, (size_t)hpml_tensor_count(n->out) * sizeof(float));
    hpml_comm_compute((hpml_comm *)n->attr.custom->user, 1e-3 / 8 * (double)n->out->shape[0]);
    return HPML_OK;
}
static hpml_status work_backward(const hpml_run *run, hpml_node *n)
{
    hpml_node_give(run, n, 0, n->out->grad);
    hpml_comm_compute((hpml_comm *)n->attr.custom->user, 2e-3 / 8 * (double)n->out->shape[0]);
    return HPML_OK;
}

static hpml_tensor *layer(hpml_comm *c, hpml_tensor *x, int width, hpml_act act)
{
    const hpml_custom work = { .name = "work", .forward = work_forward, .backward = work_backward, .user = c,
                               .flops = 1e9 };
    hpml_linear_desc  d    = { .activation = act };
    hpml_tensor      *h    = hpml_linear(x, width, &d);
    return hpml_custom_op(&h, 1, &work);
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
    hpml_tensor         *in = hpml_input_2d(ctx, BATCH, shape[0]), *h = in;           /* (B, 784) */
    for (int i = 1; i < LAYERS; i++) h = layer(c, h, WIDTH, HPML_ACT_TANH);           /* (B, 32) */
    h = layer(c, h, 10, HPML_ACT_NONE);                                               /* (B, 10) */
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
        if (hpml_comm_rank(c) == 0 && s == 0) j->first_loss = info.loss;
    }
    hpml_distribute_finish(d);
    hpml_barrier(c);
    double seconds = (hpml_comm_now(c) - start) / j->steps;
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
    bool           flows = d.kind == HPML_PIPE_STASH || d.kind == HPML_PIPE_VERTICAL;
    d.micro = j->plan.micro > 0 ? j->plan.micro : 4 * d.stages;
    if (flows) d.micro = j->steps;
    return d;
}

static int slots_of(const hpml_pipe_desc *d, int stage)
{
    int slots = 0;
    for (int c = 0; hpml_pipe_slots(d, stage, c) > 0; c++) slots += hpml_pipe_slots(d, stage, c);
    return slots;
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
    else if (d->kind == HPML_PIPE_ZERO_BUBBLE)
        printf("simulated: %.1f ms a step, bubble %.2f %% (formula %.2f %%), %d to %d in flight\n\n", 1e3 * j->seconds,
               100 * bubble, 100 * formula, slots_of(d, 0), slots_of(d, d->stages - 1));
    else
        printf("%.1f ms a step, bubble %.2f %% (formula %.2f %%), %d to %d in flight,\n%lld bytes a step, loss %.3f "
               "after %d steps\n\n", 1e3 * j->seconds, 100 * bubble, 100 * formula, slots_of(d, 0),
               slots_of(d, d->stages - 1), (long long)j->bytes, j->loss, j->steps);
    fflush(stdout);
}

static bool run(trial *j, bool json, bool environment)
{
    char                 why[768];
    hpml_pipe_simulation s;
    hpml_launch_desc     l = { .transport = HPML_TRANSPORT_CLOCK, .ranks = j->ranks, .ctx = { .seed = 1, .threads = 1 },
                               .plan = environment ? NULL : &j->plan };
    hpml_pipe_desc d = pipe_of(j);
    if (environment && hpml_plan_parse(getenv("HPML_PLAN"), &j->plan, why, sizeof why) != HPML_OK)
        return fprintf(stderr, "%s\n", why), false;
    d = pipe_of(j);
    l.ranks = d.stages;
    if (d.kind != HPML_PIPE_ZERO_BUBBLE && hpml_launch(&l, train, j, why, sizeof why) != HPML_OK)
        return fprintf(stderr, "%s\n", why), false;
    if (!draw(&d, &s, json)) return fprintf(stderr, "cannot draw into build/\n"), false;
    double formula = hpml_pipe_bubble(&d), work = 3e-3 / 8 * BATCH * LAYERS / d.stages; /* seconds of a stage's step */
    if (d.kind == HPML_PIPE_STASH || d.kind == HPML_PIPE_VERTICAL)
        formula = (d.stages - 1.0) / (j->steps + d.stages - 1); /* the pipeline is filled and emptied once */
    if (d.kind == HPML_PIPE_ZERO_BUBBLE) j->seconds = work / (1 - s.bubble); /* simulated */
    print(j, &d, 1 - work / j->seconds, formula, json);
    return true;
}

int main(int argc, char **argv)
{
    int64_t      stages = 4, micro = 8, steps = 16;
    int          json = 0;
    const char  *trace = NULL;
    option_words only = { { NULL }, 0 };
    const option table[] = {
        { "SCHEDULE", OPTION_WORDS, &only, NULL, "gpipe, 1f1b, ...: only these" },
        { "--stages", OPTION_COUNT, &stages, "N", "ranks of the pipeline (4)" },
        { "--micro", OPTION_COUNT, &micro, "N", "micro-batches of a batch of 64 samples (8)" },
        { "--steps", OPTION_COUNT, &steps, "N", "steps of training (16)" },
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
        good  = run(&j, json, environment) && good;
        first = 0;
        if (environment) break;
    }
    return !good;
}
