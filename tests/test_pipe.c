/* Pipelines: schedules as moves against formulas and rules, cuts against all possible cuts. */
#include <stdbool.h>
#define HPML_COMM_IMPLEMENTATION /* private functions; hpml.h's body is compiled apart */
#include "../hpml_comm.h"
#include "test.h"

#define EACH_KIND(kind) for (int kind = 0; kind < HPML_PIPE_COUNT; kind++)

static hpml_pipe_desc pipe_of(int kind, int stages, int chunks, int micro)
{
    hpml_pipe_desc d = { 0 };
    d.kind   = (hpml_pipe_kind)kind;
    d.stages = stages;
    d.chunks = kind == HPML_PIPE_INTERLEAVED ? chunks : 0;
    d.micro  = micro;
    return d;
}

static bool stashes(int kind) { return kind == HPML_PIPE_STASH || kind == HPML_PIPE_VERTICAL; }

/* The tasks of one stage, checked one by one: every pass once, in an order that makes sense, slots in use once. */
static bool check_stage(const hpml_pipe_desc *d, int chunks, int stage, int *tasks)
{
    enum { MOST = 12 };
    int            forward[4][MOST] = { { 0 } }, backward[4][MOST] = { { 0 } }, weights[4][MOST] = { { 0 } };
    int            owner[64], updates = 0, live = 0, versions[MOST] = { 0 };
    hpml_pipe_task t;
    for (int i = 0; i < 64; i++) owner[i] = -1;
    for (*tasks = 0; hpml_pipe_move(d, stage, *tasks, &t); ++*tasks) {
        int c = t.chunk, i = t.micro;
        if (c < 0 || c >= chunks || i < 0 || i >= d->micro || t.slot < 0 || t.slot >= 64) return false;
        if (t.work == HPML_PIPE_UPDATE) {
            if (!stashes(d->kind) && (live > 0 || *tasks == 0)) return false;
            if (t.version != ++updates) return false;
            continue;
        }
        if (t.piece != c * d->stages + stage) return false;
        if (t.work == HPML_PIPE_FORWARD) {
            if (forward[c][i]++ || owner[t.slot] >= 0) return false;
            owner[t.slot] = c * MOST + i;
            versions[i]   = t.version;
            if (d->kind == HPML_PIPE_STASH && t.version != updates) return false;
            if (t.version > updates) return false;
            live++;
            continue;
        }
        if (t.work == HPML_PIPE_BACKWARD_WEIGHTS && (weights[c][i]++ || !backward[c][i])) return false;
        if (t.work != HPML_PIPE_BACKWARD_WEIGHTS && (backward[c][i]++ || !forward[c][i])) return false;
        if (owner[t.slot] != c * MOST + i || t.version != versions[i]) return false;
        if (t.work == HPML_PIPE_BACKWARD_INPUTS) continue;
        owner[t.slot] = -1;
        live--;
    }
    for (int c = 0; c < chunks; c++)
        for (int i = 0; i < d->micro; i++)
            if (forward[c][i] != 1 || backward[c][i] != 1) return false;
    return updates == (stashes(d->kind) ? d->micro : 1);
}

#define EACH_PIPE(d, kind, p, v, m) /* all small pipelines; d: their desc */ \
    EACH_KIND(kind) \
        for (int p = 1; p <= 6; p++) \
            for (int v = 1; v <= (kind == HPML_PIPE_INTERLEAVED ? 3 : 1); v++) \
                for (int m = 1; m <= 12; m++) \
                    for (hpml_pipe_desc d = pipe_of(kind, p, v, m); d.stages > 0; d.stages = 0)

TEST(every_pass_once)
{
    EACH_PIPE(d, kind, p, v, m)
        for (int stage = 0; stage < p; stage++) {
            int tasks, each = kind == HPML_PIPE_ZERO_BUBBLE ? 3 : 2;
            ENSURE(check_stage(&d, v, stage, &tasks));
            ENSURE(tasks == (stashes(kind) ? 3 * m : each * m * v + 1));
        }
}

static int most(int a, int b) { return a > b ? a : b; }
static int least(int a, int b) { return a < b ? a : b; }

TEST(slots_and_versions)
{
    EACH_PIPE(d, kind, p, v, m)
        for (int stage = 0; stage < p; stage++) {
            int slots = hpml_pipe_slots(&d, stage, 0), versions = hpml_pipe_versions(&d, stage);
            if (kind == HPML_PIPE_GPIPE) ENSURE(slots == m);
            if (kind == HPML_PIPE_ZERO_BUBBLE) ENSURE(slots == least(p, m));
            if (v == 1 && (kind == HPML_PIPE_1F1B || stashes(kind) || kind == HPML_PIPE_INTERLEAVED))
                ENSURE(slots == least(p - stage, m) || kind == HPML_PIPE_INTERLEAVED);
            if (kind == HPML_PIPE_STASH) ENSURE(versions == least(p - stage, m));
            else ENSURE(versions == (kind == HPML_PIPE_VERTICAL ? least(p, m) : 1));
            ENSURE(hpml_pipe_slots(&d, stage, v) == 0);
        }
    hpml_pipe_desc d = pipe_of(HPML_PIPE_1F1B, 4, 1, 8);
    ENSURE(hpml_pipe_slots(&d, 4, 0) == 0 && hpml_pipe_versions(&d, -1) == 0);
}

/* Plays a pipeline and checks that every task comes after the tasks whose results it needs. */
static bool check_order(const hpml_pipe_desc *d, int chunks, hpml_pipe_simulation *out)
{
    static hpml_pipe_span spans[6 * 80];
    double                end[2][18][12], clock[6] = { 0 };
    int                   pieces = d->stages * chunks;
    if (hpml_pipe_simulate(d, out, spans, 480, NULL, 0) != HPML_OK || out->tasks > 480) return false;
    memset(end, 0, sizeof end);
    for (int k = 0; k < out->tasks; k++) {
        const hpml_pipe_span *s = &spans[k];
        const hpml_pipe_task *t = &s->task;
        double                after = clock[s->stage];
        clock[s->stage] = s->end_s;
        if (s->begin_s < after || s->end_s < s->begin_s || t->piece % d->stages != s->stage) return false;
        if (t->work == HPML_PIPE_FORWARD) {
            if (t->piece > 0 && (end[0][t->piece - 1][t->micro] == 0 || s->begin_s < end[0][t->piece - 1][t->micro]))
                return false;
            end[0][t->piece][t->micro] = s->end_s;
        } else if (t->work == HPML_PIPE_BACKWARD || t->work == HPML_PIPE_BACKWARD_INPUTS) {
            const double *need = t->piece < pieces - 1 ? end[1][t->piece + 1] : end[0][t->piece];
            if (need[t->micro] == 0 || s->begin_s < need[t->micro]) return false;
            end[1][t->piece][t->micro] = s->end_s;
        }
    }
    return true;
}

TEST(no_stage_waits_for_ever)
{
    hpml_pipe_simulation r;
    EACH_PIPE(d, kind, p, v, m) {
        int each = stashes(kind) ? 3 : kind == HPML_PIPE_ZERO_BUBBLE ? 3 : 2;
        ENSURE(check_order(&d, v, &r));
        ENSURE(r.tasks == p * (each * m * v + (stashes(kind) ? 0 : 1)));
        ENSURE_NEAR(r.compute_s, 3 * m, 1e-9);
    }
}

TEST(bubble)
{
    hpml_pipe_simulation r;
    EACH_PIPE(d, kind, p, v, m) {
        double thirds[18];
        for (int i = 0; i < 18; i++) thirds[i] = 1;
        if (kind == HPML_PIPE_ZERO_BUBBLE) d.forward_s = thirds; /* and backward_s 2, weights_s 1 */
        ENSURE(hpml_pipe_simulate(&d, &r, NULL, 0, NULL, 0) == HPML_OK);
        if (stashes(kind)) continue;
        if (kind == HPML_PIPE_INTERLEAVED && v > 1 && m % p != 0) {
            ENSURE(r.bubble >= hpml_pipe_bubble(&d) - 1e-12);
            continue;
        }
        if (kind == HPML_PIPE_ZERO_BUBBLE && m < p) continue; /* fewer gradients of weights than gaps */
        ENSURE_NEAR(r.bubble, hpml_pipe_bubble(&d), 1e-12);
    }
    hpml_pipe_desc d = pipe_of(HPML_PIPE_GPIPE, 4, 1, 8);
    ENSURE_NEAR(hpml_pipe_bubble(&d), 3.0 / 11, 1e-15);
    d.kind = HPML_PIPE_INTERLEAVED; /* two chunks */
    ENSURE_NEAR(hpml_pipe_bubble(&d), 3.0 / 19, 1e-15);
    d.kind = HPML_PIPE_ZERO_BUBBLE;
    ENSURE_NEAR(hpml_pipe_bubble(&d), 3.0 / 27, 1e-15);
}

/* TorchGPipe's clock: in tick k, stage j does the forward pass of micro-batch k - j; backward passes mirror that. */
TEST(clock_of_torchgpipe)
{
    static hpml_pipe_span spans[200];
    for (int p = 1; p <= 6; p++)
        for (int m = 1; m <= 12; m++) {
            hpml_pipe_desc       d = pipe_of(HPML_PIPE_GPIPE, p, 1, m);
            hpml_pipe_simulation r;
            ENSURE(hpml_pipe_simulate(&d, &r, spans, 200, NULL, 0) == HPML_OK && r.tasks == p * (2 * m + 1));
            for (int k = 0, i = 0; k < m + p - 1; k++)
                for (int j = most(0, k - m + 1); j < least(p, k + 1); j++, i++) {
                    int found = -1;
                    for (int s = 0; s < r.tasks; s++)
                        if (spans[s].stage == j && spans[s].task.work == HPML_PIPE_FORWARD &&
                            spans[s].task.micro == k - j) found = s;
                    ENSURE(found >= 0);
                    ENSURE_NEAR(spans[found].begin_s, k, 0);
                }
        }
}

/* Links: a message takes latency + bytes / bandwidth, and a slow stage sets the pace. */
TEST(links_and_slow_stages)
{
    static const int64_t bytes[2] = { 1000, 0 };
    static const double  slow[2] = { 1, 3 };
    hpml_pipe_desc       d = pipe_of(HPML_PIPE_1F1B, 2, 1, 1);
    hpml_pipe_simulation r;
    d.bytes = bytes;
    d.network.inside.latency   = 0.25;
    d.network.inside.bandwidth = 2000;
    d.update_s = 0.125;
    ENSURE(hpml_pipe_simulate(&d, &r, NULL, 0, NULL, 0) == HPML_OK);
    ENSURE_NEAR(r.step_s, 6 + 2 * 0.75 + 0.125, 1e-12);
    ENSURE(r.bytes == 2000);
    d.micro = 100;
    d.network.slow = slow;
    ENSURE(hpml_pipe_simulate(&d, &r, NULL, 0, NULL, 0) == HPML_OK);
    ENSURE(r.step_s > 900 && r.step_s < 910 && r.compute_s > 900 && r.compute_s < 901);
}

TEST(drawings)
{
    static hpml_pipe_span spans[100];
    char                  text[400], svg[20000];
    hpml_pipe_desc        d = pipe_of(HPML_PIPE_1F1B, 2, 1, 3);
    hpml_pipe_simulation  r;
    ENSURE(hpml_pipe_simulate(&d, &r, spans, 100, NULL, 0) == HPML_OK);
    ENSURE(hpml_pipe_text(spans, r.tasks, 12, text, sizeof text) == (int)strlen(text));
    ENSURE(strcmp(text, "  0 01..aa2bb.cc\n  1 .0aa1bb2cc..\n") == 0);
    int length = hpml_pipe_svg(spans, r.tasks, "1f1b <2>", svg, sizeof svg), rects = 0;
    ENSURE(length == (int)strlen(svg) && strstr(svg, "1f1b  2 ") && strstr(svg, "</svg>"));
    for (const char *at = svg; (at = strstr(at, "<rect ")) != NULL; at++) rects++;
    ENSURE(rects == r.tasks + 1);
    ENSURE(hpml_pipe_text(spans, 0, 12, text, sizeof text) == 0 && text[0] == 0);
}

TEST(refusals)
{
    char                 error[200];
    hpml_pipe_simulation r;
    hpml_pipe_task       t;
    hpml_pipe_desc       d = pipe_of(HPML_PIPE_GPIPE, 0, 1, 4);
    static const double  negative[2] = { 1, -1 };
    ENSURE(hpml_pipe_simulate(&d, &r, NULL, 0, error, sizeof error) == HPML_ERR_ARGUMENT && strstr(error, "0 stages"));
    ENSURE(!hpml_pipe_move(&d, 0, 0, &t) && hpml_pipe_bubble(&d) == 0 && hpml_pipe_slots(&d, 0, 0) == 0);
    d = pipe_of(HPML_PIPE_GPIPE, 2, 1, 4);
    d.chunks = 2;
    ENSURE(hpml_pipe_simulate(&d, &r, NULL, 0, error, sizeof error) == HPML_ERR_ARGUMENT && strstr(error, "gpipe"));
    d = pipe_of(99, 2, 1, 4);
    ENSURE(hpml_pipe_simulate(&d, &r, NULL, 0, error, sizeof error) == HPML_ERR_ARGUMENT && strstr(error, "99"));
    d = pipe_of(HPML_PIPE_GPIPE, 2, 1, 4);
    d.forward_s = negative;
    ENSURE(hpml_pipe_simulate(&d, &r, NULL, 0, error, sizeof error) == HPML_ERR_ARGUMENT && strstr(error, "piece 1"));
    ENSURE(hpml_pipe_simulate(&d, NULL, NULL, 0, error, sizeof error) == HPML_ERR_ARGUMENT && strstr(error, "out"));
    ENSURE(strcmp(hpml_pipe_name(HPML_PIPE_1F1B), "1f1b") == 0 && !hpml_pipe_name(HPML_PIPE_COUNT));
}

static uint32_t dice;
static double   drawn(void)
{
    dice = dice * 1664525u + 1013904223u;
    return (double)(dice >> 8) / 16777216;
}

typedef struct layers { double seconds[10]; int64_t bytes[10], params[10]; } layers;
static layers layers_draw(void)
{
    layers l;
    for (int i = 0; i < 10; i++) {
        l.seconds[i] = drawn();
        l.bytes[i]   = (int64_t)(1000 * drawn());
        l.params[i]  = (int64_t)(2000 * drawn());
    }
    return l;
}

/* All cuts of layers first to end - 1 on `ranks` ranks: the least pace. */
static double all_cuts(const hpml_pipe_cut_desc *d, int first, int ranks)
{
    double best = HUGE_VAL;
    for (int end = first + 1; end <= d->layers; end++)
        for (int r = 1; r <= (d->replicate ? ranks : 1); r++) {
            double compute = 0, params = 0, link = 0, rest = 0;
            for (int i = first; i < end; i++) {
                compute += d->seconds[i];
                params += d->param_bytes ? (double)d->param_bytes[i] : 0;
            }
            if (d->bandwidth > 0) {
                params = 4 * (r - 1.) / r * params / d->bandwidth;
                link   = end < d->layers && d->bytes ? 2 * (double)d->bytes[end - 1] / d->bandwidth : 0;
            } else params = 0;
            if ((end == d->layers) != (r == ranks)) continue;
            if (end < d->layers) rest = all_cuts(d, end, ranks - r);
            best = fmin(best, fmax(fmax(compute, params) / r, fmax(link, rest)));
        }
    return best;
}

/* The pace of the stages that hpml_pipe_cut returned, computed anew. */
static double pace_of(const hpml_pipe_cut_desc *d, const hpml_pipe_stage *s, int count, int *ranks)
{
    double worst = 0;
    *ranks = 0;
    for (int k = 0; k < count; k++) {
        double compute = 0, params = 0, r = s[k].replicas;
        if (s[k].first != (k > 0 ? s[k - 1].end : 0)) return -1;
        for (int i = s[k].first; i < s[k].end; i++) {
            compute += d->seconds[i];
            params += d->param_bytes ? (double)d->param_bytes[i] : 0;
        }
        params = d->bandwidth > 0 ? 4 * (r - 1) / r * params / d->bandwidth : 0;
        worst  = fmax(worst, fmax(compute, params) / r);
        if (k > 0 && d->bandwidth > 0 && d->bytes)
            worst = fmax(worst, 2 * (double)d->bytes[s[k].first - 1] / d->bandwidth);
        *ranks += s[k].replicas;
    }
    return s[count - 1].end == d->layers ? worst : -1;
}

TEST(cut_is_the_best_of_all)
{
    hpml_pipe_stage stages[8];
    dice = 1;
    for (int round = 0; round < 400; round++) {
        layers             l = layers_draw();
        hpml_pipe_cut_desc d = { 0 };
        double             pace;
        int                ranks;
        d.replicate   = round % 2 == 1;
        d.layers      = 1 + (int)(drawn() * (d.replicate ? 8 : 10));
        d.ranks       = 1 + (int)(drawn() * (d.replicate ? 6 : least(d.layers, 8)));
        d.seconds     = l.seconds;
        d.bytes       = round % 4 > 1 ? l.bytes : NULL;
        d.param_bytes = round % 4 > 1 ? l.params : NULL;
        d.bandwidth   = round % 3 > 0 ? 1000 : 0;
        int count = hpml_pipe_cut(&d, stages, &pace, NULL, 0);
        ENSURE(count >= 1 && count <= d.ranks && (d.replicate || count == d.ranks));
        ENSURE_NEAR(pace, all_cuts(&d, 0, d.ranks), 1e-12);
        ENSURE_NEAR(pace, pace_of(&d, stages, count, &ranks), 1e-12);
        ENSURE(ranks == d.ranks);
    }
}

TEST(cut_refusals)
{
    static const double wrong[3] = { 1, 2, -1 };
    hpml_pipe_stage     stages[8];
    hpml_pipe_cut_desc  d = { 0 };
    char                error[200];
    d.layers = 3;
    d.ranks  = 4;
    ENSURE(hpml_pipe_cut(&d, stages, NULL, error, sizeof error) == -1 && strstr(error, "seconds NULL"));
    d.seconds = wrong;
    ENSURE(hpml_pipe_cut(&d, stages, NULL, error, sizeof error) == -1 && strstr(error, "into 4"));
    d.ranks = 2;
    ENSURE(hpml_pipe_cut(&d, stages, NULL, error, sizeof error) == -1 && strstr(error, "layer 2"));
    ENSURE(hpml_pipe_cut(&d, NULL, NULL, error, sizeof error) == -1 && strstr(error, "stages NULL"));
}
