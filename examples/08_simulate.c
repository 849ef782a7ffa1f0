/* What you learn: how long a step takes on machines you do not have, and what limits it. Difficulty 2 of 4.
   cc -O2 examples/08_simulate.c -o simulate -lm -lpthread && ./simulate --model resnet50 --network 10gbit
   prints: step times in ms on 2 to 4,096 ranks, a column for each algorithm and codec ("4096 | 4.41e+05* 830.7* ..."), where
   efficiency falls below 50 % ("1-bit stripes from 256 ranks on"), and draws build/simulate.svg. Takes a second or two.
   --model mlp|cnn|resnet50|gpt2, or --layers FILE with lines "forward_s backward_s elements"; --network 100mbit|1gbit|10gbit|
   100gbit|nvlink+ib; --batch N (per rank), --gflops N (what a rank achieves), --bucket BYTES, --no-overlap, --ranks N (the
   most), --codec-ns N (to pack and unpack a byte of gradient). */
#define HPML_IMPLEMENTATION
#include "../hpml_comm.h"
#include "plot.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct model {
    const char *name;
    double      flops; /* so far: of the forward pass, for one example */
    int         count;
    double      forward[1024], backward[1024], work[1024];
    int64_t     elements[1024], packed[1024];
} model;

/* A layer in which every weight is used `uses` times for one example: 2 operations each. */
static void layer(model *m, int64_t elements, double uses)
{
    if (m->count >= 1024) return;
    m->work[m->count]       = 2. * (double)elements * uses;
    m->elements[m->count++] = elements;
}

static void make_resnet50(model *m) /* 25.5 M parameters in 54 layers; batchnorm's two per channel with their convolution */
{
    static const int blocks[] = { 3, 4, 6, 3 };
    int64_t          in = 64;
    layer(m, 3 * 49 * 64 + 128, 112 * 112);
    for (int s = 0; s < 4; s++)
        for (int b = 0; b < blocks[s]; b++) {
            int64_t w = 64 << s;
            double  area = (56 >> s) * (56 >> s);
            layer(m, in * w + 2 * w, b == 0 && s > 0 ? 4 * area : area);
            layer(m, 9 * w * w + 2 * w, area);
            layer(m, 4 * w * w + 8 * w, area);
            if (b == 0) layer(m, in * 4 * w + 8 * w, area);
            in = 4 * w;
        }
    layer(m, 2048 * 1000 + 1000, 1);
}

static void make_gpt2(model *m) /* 124 M parameters in 148 tensors; one example: 1,024 tokens */
{
    const int64_t c = 768, sizes[12] = { c, c, 3 * c * c, 3 * c, c * c, c, c, c, 4 * c * c, 4 * c, 4 * c * c, c };
    layer(m, 50257 * c, 1024); /* tied to the output: its gradient is complete last */
    layer(m, 1024 * c, 1);
    for (int b = 0; b < 12; b++)
        for (int i = 0; i < 12; i++) layer(m, sizes[i], 1024);
    layer(m, c, 1024), layer(m, c, 1024);
}

static int read_layers(model *m, const char *path)
{
    double    f, b;
    long long n;
    FILE     *file = fopen(path, "r");
    while (file && m->count < 1024 && fscanf(file, "%lf %lf %lld", &f, &b, &n) == 3)
        m->forward[m->count] = f, m->backward[m->count] = b, m->elements[m->count++] = n;
    if (!file || m->count == 0) fprintf(stderr, "%s: no lines of \"forward_s backward_s elements\"\n", path);
    if (file) fclose(file);
    return m->count > 0;
}

static int make_model(model *m, const char *file, double batch, double gflops)
{
    static const int64_t cnn[5] = { 156, 2416, 48120, 10164, 850 };
    static const double  uses[5] = { 784, 100, 1, 1, 1 };
    if (file && !read_layers(m, file)) return 0;
    if (file) m->name = file;
    else if (strcmp(m->name, "mlp") == 0) layer(m, 784 * 128 + 128, 1), layer(m, 128 * 10 + 10, 1);
    else if (strcmp(m->name, "cnn") == 0) for (int i = 0; i < 5; i++) layer(m, cnn[i], uses[i]);
    else if (strcmp(m->name, "resnet50") == 0) make_resnet50(m);
    else if (strcmp(m->name, "gpt2") == 0) make_gpt2(m);
    else return fprintf(stderr, "there is no model %s\n", m->name), 0;
    for (int i = 0; i < m->count; i++) {
        if (!file) m->forward[i] = m->work[i] * batch / gflops / 1e9, m->backward[i] = 2 * m->forward[i];
        m->packed[i] = m->elements[i] / 8 + m->elements[i] / 64; /* 1 bit, and 8 bytes for each row of some 512 */
    }
    return 1;
}

static int find_network(hpml_network *n, const char *name)
{
    static const struct { const char *name; int ranks_per_node; double latency, bandwidth; } known[] = {
        { "100mbit", 1, 100e-6, 12.5e6 }, { "1gbit", 1, 50e-6, 125e6 }, { "10gbit", 1, 20e-6, 1.25e9 },
        { "100gbit", 1, 5e-6, 12.5e9 }, { "nvlink+ib", 8, 2e-6, 25e9 } };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(name, known[i].name) == 0) {
            n->ranks_per_node = known[i].ranks_per_node;
            n->between.latency = known[i].latency, n->between.bandwidth = known[i].bandwidth;
            n->inside.latency = 1e-6, n->inside.bandwidth = 200e9;
            return 1;
        }
    fprintf(stderr, "there is no network %s\n", name);
    return 0;
}

enum { WAYS = 11 }; /* columns: five algorithms with f32 and with bf16, and 1 bit by stripes */
static const hpml_algorithm algorithms[5] = { HPML_CENTRAL, HPML_RING, HPML_BUTTERFLY, HPML_HALVING, HPML_HIERARCHICAL };
static const char *way_name(int way, char name[32])
{
    snprintf(name, 32, "%s %s", way < 5 ? "f32" : way < 10 ? "bf16" : "1-bit", way < 10 ? hpml_algorithm_name(algorithms[way % 5]) : "stripes");
    return name;
}

static int simulate(hpml_simulate_desc d, int way, int64_t *packed, double codec, hpml_simulation *s)
{
    char error[300];
    d.algorithm = algorithms[way % 5], d.element = way < 5 ? HPML_ELEMENT_F32 : HPML_ELEMENT_BF16;
    d.codec_s_per_byte = way < 5 ? 0 : codec;
    if (way == 10) d.packed = packed;
    if (hpml_simulate(&d, s, error, sizeof error) == HPML_OK) return 1;
    fprintf(stderr, "%s\n", error);
    return 0;
}

static int table(hpml_simulate_desc d, model *m, int most, double codec)
{
    static float    x[16], y[WAYS][16];
    int             rows = 0, low[WAYS] = { 0 };
    plot_series     lines[4];
    char            name[32], names[4][32], text[512];
    hpml_simulation s;
    printf("step in ms; *: efficiency below 50 %%\n%6s |%45s |%45s | 1-bit\n%6s |", "", "f32 ", "bf16 ", "ranks");
    for (int way = 0; way < WAYS; way++) printf(" %8.8s%s", strchr(way_name(way, name), ' ') + 1, way % 5 == 4 ? " |" : "");
    printf("\n");
    for (d.ranks = 2; d.ranks <= most && rows < 16; d.ranks *= 2, rows++) {
        printf("%6d |", d.ranks);
        for (int way = 0; way < WAYS; way++) {
            if (!simulate(d, way, m->packed, codec, &s)) return 0;
            printf(" %7.4g%c%s", s.step_s * 1e3, s.efficiency < 0.5 ? '*' : ' ', way % 5 == 4 ? " |" : "");
            if (s.efficiency < 0.5 && low[way] == 0) low[way] = d.ranks;
            y[way][rows] = 100 * (float)s.efficiency;
        }
        x[rows] = (float)log2(d.ranks);
        printf("\n");
    }
    puts("efficiency below 50 %, waiting more than computing:");
    for (int way = 0; way < WAYS; way++)
        if (low[way]) printf("  %s from %d ranks on\n", way_name(way, name), low[way]);
    d.ranks /= 2, d.algorithm = HPML_AUTO;
    if (hpml_simulate(&d, &s, text, sizeof text) == HPML_OK) hpml_simulate_text(&s, text, sizeof text);
    printf("%d ranks, f32, whatever is best, %s\n", d.ranks, text);
    for (int i = 0; i < 4; i++) {
        static const int shown[4] = { 1, 3, 8, 10 };
        lines[i].name = way_name(shown[i], names[i]), lines[i].x = x, lines[i].y = y[shown[i]], lines[i].count = rows;
    }
    snprintf(name, sizeof name, "%s", m->name);
    if (plot_svg("build/simulate.svg", name, "log2 of the number of ranks", "efficiency, %", lines, 4) == 0) puts("build/simulate.svg is drawn");
    return 1;
}

int main(int argc, char **argv)
{
    static model       m = { "resnet50", 0, 0, { 0 }, { 0 }, { 0 }, { 0 }, { 0 } };
    hpml_simulate_desc d = { 0 };
    const char        *file = NULL, *network = "10gbit";
    double             batch = 0, gflops = 0, codec = 0.05e-9;
    int                most = 4096;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (strcmp(argv[i], "--no-overlap") == 0) { d.no_overlap = true; continue; }
        if (strcmp(argv[i], "--model") == 0) m.name = value;
        else if (strcmp(argv[i], "--layers") == 0) file = value;
        else if (strcmp(argv[i], "--network") == 0) network = value;
        else if (strcmp(argv[i], "--batch") == 0) batch = atof(value);
        else if (strcmp(argv[i], "--gflops") == 0) gflops = atof(value);
        else if (strcmp(argv[i], "--bucket") == 0) d.bucket_bytes = (size_t)atof(value);
        else if (strcmp(argv[i], "--codec-ns") == 0) codec = atof(value) * 1e-9;
        else if (strcmp(argv[i], "--ranks") == 0) most = atoi(value);
        else return fprintf(stderr, "%s is not an option; see the first lines of this file\n", argv[i]), 2;
        i++;
    }
    int small = strcmp(m.name, "mlp") == 0 || strcmp(m.name, "cnn") == 0; /* on a CPU core; the others on a GPU */
    if (batch <= 0) batch = small ? 128 : strcmp(m.name, "gpt2") == 0 ? 8 : 64;
    if (gflops <= 0) gflops = small ? 50 : 50000;
    if (!make_model(&m, file, batch, gflops) || !find_network(&d.network, network)) return 1;
    d.layers = m.count, d.forward_s = m.forward, d.backward_s = m.backward, d.elements = m.elements;
    int64_t total = 0;
    double  compute = 0, start = hpml_now();
    for (int i = 0; i < m.count; i++) total += m.elements[i], compute += m.forward[i] + m.backward[i];
    printf("%s: %d layers, %.4g M parameters, %.4g ms of computation a step; network %s\n", m.name, m.count, (double)total / 1e6, compute * 1e3,
           network);
    if (!table(d, &m, most, codec)) return 1;
    double exchange = (double)total * 8 / d.network.between.bandwidth, many = 64;
    if (most >= 64)
        printf("a batch of %g in all is worth sharing among %.3g ranks with f32, %.3g with 1 bit (rule of Seide et al. 2014)\n", many * batch,
               hpml_optimal_ranks(many * compute, 0, exchange), hpml_optimal_ranks(many * compute, 0, exchange * 9 / 256));
    printf("simulated in %.2f s\n", hpml_now() - start);
    return 0;
}
