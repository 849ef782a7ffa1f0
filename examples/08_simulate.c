/* What you learn: how long a step takes on machines you do not have, and what limits it. Difficulty 2 of 4.
   cc -O2 examples/08_simulate.c -o simulate -lm -lpthread && ./simulate --model resnet50 --network 10gbit
   prints: step times in ms on 2 to 4,096 ranks, in three tables: f32 and bf16 by each of six algorithms, and the packed
   ones: 1 bit, 2 bits, top-k, low rank (" 4096| 4.41e+05* ..."); the last line of each says from how many ranks on
   efficiency is below 50 %. Each table is drawn, too: build/simulate_f32.svg, _bf16, _packed. Takes seconds.
   --help lists the options: models, networks, or the layers of a model of your own from a file. */
#define HPML_IMPLEMENTATION
#include "../hpml_comm.h"
#include "options.h"
#include "plot.h"
#include "screen.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

typedef struct model {
    const char *name;
    int         count;
    double      forward[1024], backward[1024];
    int64_t     elements[1024], sent[1024];
} model;

/* A layer in which every weight is used `uses` times for one example: 2 operations each, in the field that
   later holds seconds. */
static void layer(model *m, int64_t elements, double uses)
{
    m->forward[m->count] = 2. * (double)elements * uses, m->elements[m->count++] = elements;
}

/* 25.5 M parameters in 54 layers; batchnorm's two per channel with their convolution */
static void make_resnet50(model *m)
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
    if (file) return m->name = file, read_layers(m, file);
    if (strcmp(m->name, "mlp") == 0) layer(m, 784 * 128 + 128, 1), layer(m, 128 * 10 + 10, 1);
    else if (strcmp(m->name, "cnn") == 0) for (int i = 0; i < 5; i++) layer(m, cnn[i], uses[i]);
    else if (strcmp(m->name, "resnet50") == 0) make_resnet50(m);
    else make_gpt2(m);
    for (int i = 0; i < m->count; i++) m->forward[i] *= batch / gflops / 1e9, m->backward[i] = 2 * m->forward[i];
    return 1;
}

static void find_network(hpml_network *n, const char *name)
{
    static const struct { const char *name; int ranks_per_node; hpml_link between; } known[] = {
        { "100mbit", 1, { 100e-6, 12.5e6 } }, { "1gbit", 1, { 50e-6, 125e6 } }, { "10gbit", 1, { 20e-6, 1.25e9 } },
        { "100gbit", 1, { 5e-6, 12.5e9 } }, { "nvlink+ib", 8, { 2e-6, 25e9 } } };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(name, known[i].name) == 0) {
            n->ranks_per_node = known[i].ranks_per_node, n->between = known[i].between;
            n->inside.latency = 1e-6, n->inside.bandwidth = 200e9;
        }
}

/* How gradients travel: by an allreduce, or as a codec packs them, by stripes. */
typedef struct way {
    const char     *name;
    hpml_algorithm  algorithm;
    double          rounds; /* the latencies of that allreduce */
    hpml_codec_kind codec;
} way;
static const way ways[10] = {
    { "central", HPML_CENTRAL, 1, HPML_CODEC_NONE }, { "tree", HPML_TREE, 1, HPML_CODEC_NONE },
    { "ring", HPML_RING, 1, HPML_CODEC_NONE }, { "butterfly", HPML_BUTTERFLY, 1, HPML_CODEC_NONE },
    { "halving", HPML_HALVING, 1, HPML_CODEC_NONE }, { "hierarchical", HPML_HIERARCHICAL, 1, HPML_CODEC_NONE },
    { "1-bit", HPML_AUTO, 1, HPML_CODEC_ONEBIT }, { "2-bit", HPML_AUTO, 1, HPML_CODEC_TWOBIT },
    { "top-k 1 %", HPML_RING, 0.5, HPML_CODEC_TOPK }, { "low rank 2", HPML_RING, 2, HPML_CODEC_LOWRANK } };

static bool by_stripes(const way *w) { return w->codec == HPML_CODEC_ONEBIT || w->codec == HPML_CODEC_TWOBIT; }

/* What a layer of n numbers, taken as a square matrix, sends: bytes by stripes, else elements of an allreduce. Low rank
   adds up P and then Q, of 2 columns each. With top-k all pairs of p ranks, 8 k p bytes, go round in p - 1 rounds,
   which takes as long as a ring allreduce of half the bytes: twice the rounds, at half the latency. */
static int64_t size_of(const way *w, int64_t n, int ranks)
{
    int64_t side = (int64_t)ceil(sqrt((double)n));
    if (n < HPML_CODEC_MIN_ELEMENTS) return by_stripes(w) ? 4 * n : n;
    if (by_stripes(w)) return side * (int64_t)hpml_codec_get(w->codec)->row_size(NULL, side);
    if (w->codec == HPML_CODEC_TOPK) return n / 100 * ranks;
    return w->codec == HPML_CODEC_LOWRANK ? 2 * 2 * side : n;
}

static int simulate(hpml_simulate_desc d, const way *w, model *m, hpml_simulation *s)
{
    char   error[300];
    double all = 0, sent = 0, bucket = d.bucket_bytes ? (double)d.bucket_bytes : 25 * 1048576.;
    for (int i = 0; i < m->count; i++)
        all += (double)m->elements[i], sent += (double)(m->sent[i] = size_of(w, m->elements[i], d.ranks));
    d.algorithm = w->algorithm, d.network.inside.latency *= w->rounds, d.network.between.latency *= w->rounds;
    if (by_stripes(w)) d.packed = m->sent;
    else if (sent > 0) /* as many buckets as ever, and as much to pack */
        d.elements = m->sent, d.bucket_bytes = (size_t)ceil(bucket * sent / all), d.codec_s_per_byte *= all / sent;
    return hpml_simulate(&d, s, error, sizeof error) == HPML_OK || (fprintf(stderr, "%s\n", error), 0);
}

static int table(hpml_simulate_desc d, const char *what, const way *w, int count, model *m, int most, const char *dir)
{
    static float    x[16], y[6][16];
    int             rows = 0, low[6] = { 0 };
    plot_series     lines[6];
    char            path[1024], text[512], line[600];
    int             width[6]; /* six columns fit 80 */
    hpml_simulation s;
    printf("%s: step in ms; *: efficiency below 50 %%, waiting more than computing\nranks|", what);
    for (int i = 0; i < count; i++) {
        width[i] = strlen(w[i].name) > 11 ? 12 : 11;
        printf(" %*s", width[i], w[i].name);
    }
    for (d.ranks = 2; d.ranks <= most && rows < 16; d.ranks *= 2, rows++) {
        printf("\n%5d|", d.ranks);
        for (int i = 0; i < count; i++) {
            if (!simulate(d, &w[i], m, &s)) return 0;
            printf(" %*.4g%c", width[i] - 1, s.step_s * 1e3, s.efficiency < 0.5 ? '*' : ' ');
            if (s.efficiency < 0.5 && low[i] == 0) low[i] = d.ranks;
            x[rows] = (float)d.ranks, y[i][rows] = (float)(s.step_s * 1e3);
        }
    }
    printf("\n*from|");
    for (int i = 0; i < count; i++) {
        snprintf(text, sizeof text, low[i] ? "%d" : "-", low[i]);
        printf(" %*s ", width[i] - 1, text);
        lines[i].name = w[i].name, lines[i].x = x, lines[i].y = y[i], lines[i].count = rows;
    }
    snprintf(path, sizeof path, "%s/simulate_%s.svg", dir, what), snprintf(text, sizeof text, "%s, %s", m->name, what);
    plot_chart chart = { path, text, "ranks", "step time in ms", lines, count, .log_x = 2, .log_y = 10 };
    if (plot_draw(&chart) == 0)
        printf("\n%s is drawn", path);
    d.ranks /= 2; /* the most */
    if (count == 6 && hpml_simulate(&d, &s, text, sizeof text) == HPML_OK &&
        hpml_simulate_text(&s, text, sizeof text) > 0) {
        snprintf(line, sizeof line, "\n%d ranks, %s, by the best algorithm: %s", d.ranks, what, text);
        screen_paragraph(line);
    } else printf("\n");
    return putchar('\n') >= 0;
}

int main(int argc, char **argv)
{
    static model       m = { "resnet50", 0, { 0 }, { 0 }, { 0 }, { 0 } };
    hpml_simulate_desc d = { 0 };
    const char        *file = NULL, *network = "10gbit", *dir = "build";
    double             batch = 0, gflops = 0, codec = 0.05;
    int64_t            most = 4096, bucket = 0;
    int                alone = 0;
    char               text[512];
    const option       options[] = {
        { "--model", OPTION_CHOICE, &m.name, "mlp|cnn|resnet50|gpt2", "what is trained (resnet50)" },
        { "--layers", OPTION_TEXT, &file, "FILE", "or lines of \"forward_s backward_s elements\"" },
        { "--network", OPTION_CHOICE, &network, "100mbit|1gbit|10gbit|100gbit|nvlink+ib", "between nodes (10gbit)" },
        { "--ranks", OPTION_COUNT, &most, "N", "the most ranks (4096)" },
        { "--batch", OPTION_REAL, &batch, "N", "samples of a step, per rank (128; resnet50 64, gpt2 8)" },
        { "--gflops", OPTION_REAL, &gflops, "N", "what a rank achieves (mlp and cnn 50, else 50000)" },
        { "--bucket", OPTION_BYTES, &bucket, "BYTES", "gradients of one message (25M)" },
        { "--codec-ns", OPTION_REAL, &codec, "X", "to pack and unpack a byte of gradient (0.05)" },
        { "--no-overlap", OPTION_FLAG, &alone, NULL, "messages start after the backward pass" },
        { "--out", OPTION_TEXT, &dir, "DIR", "where simulate_f32.svg, _bf16, _packed go (build)" } };
    int failed = options_read("Step times of data-parallel training on machines that you do not have.", options,
                              sizeof options / sizeof *options, argc, argv);
    if (failed) return failed == 1 ? 0 : failed;
    d.no_overlap   = alone;
    d.bucket_bytes = (size_t)bucket;
    int small = strcmp(m.name, "mlp") == 0 || strcmp(m.name, "cnn") == 0; /* on a CPU core; the others on a GPU */
    if (batch <= 0) batch = small ? 128 : strcmp(m.name, "gpt2") == 0 ? 8 : 64;
    if (gflops <= 0) gflops = small ? 50 : 50000;
    if (!make_model(&m, file, batch, gflops) ) return 1;
    find_network(&d.network, network);
    mkdir(dir, 0777);
    d.layers = m.count, d.forward_s = m.forward, d.backward_s = m.backward, d.elements = m.elements;
    double total = 0, compute = 0, many = 64, start = hpml_now();
    for (int i = 0; i < m.count; i++) total += (double)m.elements[i], compute += m.forward[i] + m.backward[i];
    snprintf(text, sizeof text, "%s: %d layers, %.4g M parameters, %.4g ms of computation a step; network %s\n", m.name,
             m.count, total / 1e6, compute * 1e3, network);
    screen_paragraph(text);
    if (!table(d, "f32", ways, 6, &m, (int)most, dir)) return 1;
    d.codec_s_per_byte = codec * 1e-9, d.element = HPML_ELEMENT_BF16;
    if (!table(d, "bf16", ways, 6, &m, (int)most, dir)) return 1;
    d.element = HPML_ELEMENT_F32;
    if (!table(d, "packed", ways + 6, 4, &m, (int)most, dir)) return 1;
    double exchange = total * 8 / d.network.between.bandwidth;
    snprintf(text, sizeof text, "a batch of %g in all is worth sharing among %.3g ranks with f32, %.3g with 1 bit "
             "(rule of Seide et al. 2014)", many * batch, hpml_optimal_ranks(many * compute, 0, exchange),
             hpml_optimal_ranks(many * compute, 0, exchange * 9 / 256));
    screen_paragraph(text);
    printf("simulated in %.2f s\n", hpml_now() - start);
    return 0;
}
