/* What you learn: which plan trains a model fastest on a machine that you do not have, and what decides.
   cc -O2 examples/30_forecast.c -o forecast -lm -lpthread && ./forecast --model gpt2 --machine dgx-2 --ranks 32
   prints the ten best plans of a search, each with the time of a step, memory of a rank, bytes that a rank sends and
   the term that decides; then the best and the second one, term by term, and which resource binds each kind of layer.
   Draws build/forecast.svg: samples a second over ranks, for the best plan's axes and for data alone.
   Difficulty 3 of 4. Takes some seconds; --forecasts 1000 searches longer. --plan "tensor=8": this field stays;
   --lossy: codecs as well; --json: an object a line; --machines: lists the machines; --help: all options. */
#define HPML_IMPLEMENTATION
#include "../hpml_comm.h"
#include "options.h"
#include "plot.h"
#include "screen.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { LAYERS = 256, BEST = 10 };

typedef struct model {
    const char *name;
    int         blocks;
    int64_t     C, T, V; /* width, tokens of a sample, vocabulary */
} model;
static const model models[] = {
    { "gpt2", 12, 768, 1024, 50304 },   /* 124 M parameters */
    { "gpt2-xl", 48, 1600, 1024, 50304 }, /* 1.6 G */
    { "gpt-13b", 40, 5120, 2048, 50304 },
};

static hpml_layer_facts layer[LAYERS];

static void add(hpml_model_facts *f, hpml_layer_facts l) { layer[f->layers++] = l; }

/* Numbers of a sample, in f32. Attention and the two dense layers of a block are split over axis tensor as in Megatron:
   each ends in a sum over the ranks, forward, and its input's gradient is summed, backward. */
static void make_transformer(hpml_model_facts *f, const model *m)
{
    const int64_t C = m->C, T = m->T, TC = T * C;
    add(f, (hpml_layer_facts){ .name = "embedding", .flops = (double)TC, .bytes = 8. * (double)TC, .rows = m->V,
                               .cols = C, .edge = TC, .kept = 4 * TC, .forward_sum = TC, .split = true });
    for (int i = 0; i < m->blocks; i++) {
        add(f, (hpml_layer_facts){ .name = "attention", .flops = 8. * (double)(TC * C) + 4. * (double)(T * TC),
                                   .bytes = 40. * (double)TC, .rows = 4 * C, .cols = C, .edge = TC, .kept = 24 * TC,
                                   .forward_sum = TC, .backward_sum = TC, .pass = 2 * TC, .split = true });
        add(f, (hpml_layer_facts){ .name = "mlp", .flops = 16. * (double)(TC * C), .bytes = 48. * (double)TC,
                                   .rows = 8 * C, .cols = C, .edge = TC, .kept = 40 * TC, .forward_sum = TC,
                                   .backward_sum = TC, .split = true });
    }
    add(f, (hpml_layer_facts){ .name = "head", .flops = 2. * (double)(TC * m->V), .bytes = 4. * (double)(T * m->V),
                               .rows = m->V, .cols = C, .edge = T * m->V, .kept = 4 * T * m->V, .backward_sum = TC,
                               .split = true });
}

/* A network for images of 784 numbers, too small to be split. */
static void make_mlp(hpml_model_facts *f)
{
    static const int64_t width[5] = { 784, 2048, 2048, 2048, 10 };
    for (int i = 0; i < 4; i++)
        add(f, (hpml_layer_facts){ .name = "dense", .flops = 2. * (double)(width[i] * width[i + 1]),
                                   .bytes = 4. * (double)(width[i] + width[i + 1]), .rows = width[i + 1],
                                   .cols = width[i], .edge = width[i + 1], .kept = 8 * width[i + 1] });
}

static int make_model(hpml_model_facts *f, const char *name)
{
    f->layer  = layer;
    f->states = 2; /* adam */
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++)
        if (strcmp(models[i].name, name) == 0) make_transformer(f, &models[i]);
    if (f->layers == 0) make_mlp(f);
    return f->layers;
}

static void list_machines(void)
{
    printf("%-14s %6s %9s %8s %7s %9s %9s  %s\n", "machine", "ranks", "TFLOP/s", "GB/s", "GB", "inside", "between",
           "fabric");
    for (int i = 0; hpml_machine_at(i); i++) {
        const hpml_machine *m = hpml_machine_at(i);
        hpml_network        n;
        hpml_machine_network(m, 16 * m->network.ranks_per_node, &n);
        printf("%-14s %6d %9.3g %8.3g %7.3g %9.3g %9.3g  %s\n", m->name, (int)m->network.ranks_per_node,
               1e-12 * m->flops, 1e-9 * m->bandwidth, 1e-9 * (double)m->memory, 1e-9 * n.inside.bandwidth,
               1e-9 * n.between.bandwidth, hpml_fabric_name(m->fabric));
    }
}

static void print_plan(const hpml_found *found, int rank, int json)
{
    char                   text[300];
    const hpml_prediction *p = &found->prediction;
    hpml_plan_text(&found->plan, false, text, sizeof text);
    if (json)
        printf("{\"rank\": %d, \"plan\": \"%s\", \"step_ms\": %.6g, \"samples_s\": %.6g, \"compute_ms\": %.6g, "
               "\"exposed_ms\": %.6g, \"bubble\": %.4f, \"memory_gb\": %.4g, \"mb_rank\": %.6g, \"mb_between\": %.6g, "
               "\"decides\": \"%s\"}\n", rank, text, 1e3 * p->step_s, p->samples_s, 1e3 * p->term_s[HPML_TERM_COMPUTE],
               1e3 * p->exposed_s, p->bubble, 1e-9 * (double)p->memory, 1e-6 * (double)p->rank_bytes,
               1e-6 * (double)p->between_bytes, hpml_term_name(p->decides));
    else
        printf("%2d %9.4g ms %8.3g/s %6.3g GB %9.4g MB  %-8s %s\n", rank, 1e3 * p->step_s, p->samples_s,
               1e-9 * (double)p->memory, 1e-6 * (double)p->rank_bytes, hpml_term_name(p->decides), text);
}

/* Samples a second on 1, 2, 4 ... ranks: the best plan's axes inside, data what is left, and data alone. */
static int draw(const hpml_plan *best, hpml_model_facts f, const hpml_machine *m, int most, const char *dir)
{
    float       x[2][16], y[2][16];
    int         count[2] = { 0, 0 };
    plot_series s[2] = { { "best plan's axes", x[0], y[0], 0 }, { "data alone", x[1], y[1], 0 } };
    char        path[512];
    for (int ranks = 1; ranks <= most; ranks *= 2)
        for (int k = 0; k < 2; k++) {
            hpml_prediction p;
            hpml_plan       plan = { .global_batch = best->global_batch };
            hpml_machine    roomy = *m;
            if (k == 0) plan = *best;
            if (k == 1) roomy.memory = 0; /* data alone may not fit: its speed is drawn nevertheless */
            f.facts.ranks = ranks;
            if (hpml_forecast(&plan, &f, &roomy, &p, NULL, 0) != HPML_OK || count[k] == 16) continue;
            x[k][count[k]]   = (float)ranks;
            y[k][count[k]++] = (float)p.samples_s;
        }
    for (int k = 0; k < 2; k++) s[k].count = count[k];
    mkdir(dir, 0777);
    snprintf(path, sizeof path, "%s/forecast.svg", dir);
    return plot_svg(path, m->name, "ranks", "samples a second", s, 2);
}

int main(int argc, char **argv)
{
    const char      *model = "gpt2-xl", *machine = "v100-nvlink", *plan = "", *dir = "build";
    int64_t          ranks = 32, batch = 64, forecasts = 200;
    int              json = 0, machines = 0, lossy = 0;
    static hpml_found found[BEST];
    char             why[600], text[2000];
    const option     table[] = {
        { "--model", OPTION_CHOICE, &model, "mlp|gpt2|gpt2-xl|gpt-13b", "the model (gpt2-xl)" },
        { "--machine", OPTION_TEXT, &machine, "NAME", "the machine, see --machines (v100-nvlink)" },
        { "--ranks", OPTION_COUNT, &ranks, "N", "accelerators, up to 65,536 (32)" },
        { "--batch", OPTION_COUNT, &batch, "N", "samples of a step, of all ranks (64)" },
        { "--plan", OPTION_TEXT, &plan, "TEXT", "fields that the search leaves as they are, as in HPML_PLAN" },
        { "--forecasts", OPTION_COUNT, &forecasts, "N", "plans that the search tries at most (200)" },
        { "--lossy", OPTION_FLAG, &lossy, NULL, "tries codecs as well, which change what is learned" },
        { "--out", OPTION_TEXT, &dir, "DIR", "where forecast.svg goes (build)" },
        { "--json", OPTION_FLAG, &json, NULL, "an object a line" },
        { "--machines", OPTION_FLAG, &machines, NULL, "lists the machines and stops" },
    };
    hpml_model_facts f = { 0 };
    hpml_search_desc d = { .seed = 1 };
    hpml_search_counts counts;
    int code = options_read("Forecasts and ranks plans.", table, sizeof table / sizeof table[0], argc, argv);
    if (code) return code - 1 ? code : 0;
    if (machines) return list_machines(), 0;
    const hpml_machine *m = hpml_machine_find(machine);
    if (!m) return fprintf(stderr, "--machine %s: not known; --machines lists them\n", machine), 2;
    make_model(&f, model);
    f.facts.ranks       = (int32_t)ranks;
    f.facts.batch       = batch > 0 ? batch : 1;
    d.base.global_batch = f.facts.batch;
    d.forecasts         = (int32_t)forecasts;
    d.lossy             = lossy != 0;
    if (hpml_plan_parse(plan, &d.base, why, sizeof why) != HPML_OK) return fprintf(stderr, "%s\n", why), 2;
    int count = hpml_search(&d, &f, m, found, BEST, &counts, why, sizeof why);
    if (count < 0) return fprintf(stderr, "%s\n", why), 1;
    if (!json) printf("%s on %d ranks of %s: %d plans were forecast, %.0f %% of their messages were known\n",
                      model, (int)ranks, m->name, (int)counts.forecasts,
                      100. * (double)counts.reused / (double)(counts.messages + 1));
    if (!json) printf(" %14s %9s %9s %12s  %-8s plan\n", "step", "samples", "memory", "sent", "decides");
    for (int i = 0; i < count; i++) print_plan(&found[i], i + 1, json);
    if (draw(&found[0].plan, f, m, (int)ranks, dir) != 0) return fprintf(stderr, "%s: cannot write\n", dir), 1;
    if (json) return 0;
    hpml_search_text(found, count, text, sizeof text);
    printf("\n");
    screen_paragraph(text);
    hpml_roofline_text(&f, m, 1, text, sizeof text);
    printf("\n%s", text);
    return 0;
}
