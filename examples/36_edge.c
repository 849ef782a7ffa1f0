/* What you learn: a net divided over a device, an edge server and the cloud, where the device answers most samples
   (Teerapittayanon et al. 2017, "Distributed Deep Neural Networks"). Difficulty 3 of 4.
   cc -O2 examples/36_edge.c -o edge -lm -lpthread && ./edge [seed]
   Each section of the net ends in an exit, a classifier of its own; the loss is the sum of the three exits' losses. The
   features that a section sends upward are signs, one bit each. The derivative of a sign is 0 nearly everywhere, so the
   backward pass takes that of a clipped line in its place (straight-through estimator). The cloud trains the net, and
   sends the other sections their parameters. Then three ranks run one section each: a rank answers a sample where the
   entropy of the exit's probabilities, divided by log(10), is below T, and sends the bits of other samples upward.
   prints for each T the samples that each rank answers, the accuracy, the bytes that all ranks send for a sample; then
            T 0.2: 79.0 % stay on the device; +0.25 points; 1/32 of the images' bytes     (points: accuracy above T 0's)
   exit 1 with a sentence if that T costs more than 1 point of accuracy or more than 1/10 of the images' bytes. */
#define HPML_IMPLEMENTATION
#include "../hpml_comm.h"
#include "digits.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DEVICE, EDGE, CLOUD, SECTIONS };
enum { BATCH = 100, LEARN = 6000, TESTED = 2000, EPOCHS = 4, CLASSES = 10, PIXELS = DIGITS_PIXELS, TRIALS = 7 };
enum { DEVICE_MAPS = 16, DEVICE_BITS = DEVICE_MAPS * 49, EDGE_MAPS = 24, EDGE_BITS = EDGE_MAPS * 9 }; /* whole bytes */

static const char *const name_of[SECTIONS] = { "device", "edge", "cloud" };
typedef struct trial { int64_t answered[SECTIONS], right, bytes; } trial; /* of one T: samples; bytes sent */

/* y = 1 where x >= 0, else -1. */
static hpml_status sign_forward(const hpml_run *run, hpml_node *node)
{
    const float *x = node->src[0]->data;
    (void)run;
    for (int64_t i = 0; i < hpml_tensor_count(node->out); i++) node->out->data[i] = x[i] >= 0 ? 1.0f : -1.0f;
    return HPML_OK;
}

/* dx = dy where |x| <= 1, else 0: the derivative of max(-1, min(x, 1)). */
static hpml_status sign_backward(const hpml_run *run, hpml_node *node)
{
    const float *x = node->src[0]->data, *dy = node->out->grad;
    float       *dx = node->src[0]->grad;
    (void)run;
    for (int64_t i = 0; dx && i < hpml_tensor_count(node->out); i++) dx[i] += fabsf(x[i]) <= 1 ? dy[i] : 0;
    return HPML_OK;
}

/* Records a section. Returns the bits that go upward, as 1 and -1; *scores: those of the section's exit, (B, 10). */
static hpml_tensor *section(int number, hpml_tensor *x, hpml_tensor **scores)
{
    static const struct { int32_t channels, side, maps, kernel, stride; } size[CLOUD] = {
        { 1, 28, DEVICE_MAPS, 5, 2 }, { DEVICE_MAPS, 7, EDGE_MAPS, 3, 1 } };
    static const hpml_custom sign = { .name = "sign", .forward = sign_forward, .backward = sign_backward,
                                      .keeps = HPML_KEEP_SRC(0) };
    char name[3][24]; /* of the layers: the rank's name and a number */
    for (int i = 0; i < 3; i++) snprintf(name[i], sizeof name[i], "%s.%d", name_of[number], i);
    hpml_linear_desc hidden = { .name = name[0], .activation = HPML_ACT_RELU }, last = { .name = name[2] };
    hpml_norm_desc   norm   = { .name = name[1] };
    hpml_tensor     *h;
    if (number == CLOUD) h = hpml_linear(x, 256, &hidden); /* x (B, 216) bits of the edge */
    else {                                                 /* x (B, 784) pixels, or bits of the device */
        const int32_t    side = size[number].side, kernel = size[number].kernel;
        hpml_conv2d_desc conv = { .name = name[0], .kernel_h = kernel, .padding_h = kernel / 2,
                                  .stride_h = size[number].stride, .no_bias = true };
        h = hpml_conv2d(hpml_reshape_4d(x, -1, size[number].channels, side, side), size[number].maps, &conv);
        h = hpml_batchnorm(hpml_max_pool2d(h, 2, 0, 0), &norm); /* (B, 16, 7, 7) or (B, 24, 3, 3) */
        h = hpml_flatten(hpml_custom_op(&h, 1, &sign));
    }
    *scores = hpml_linear(h, CLASSES, &last);
    return h;
}

/* Trains all sections together. */
static hpml_status train(hpml_ctx *ctx, uint64_t seed)
{
    hpml_dataset *data  = digits_dataset(ctx, 2 * seed, LEARN);
    hpml_tensor  *x     = hpml_input_2d(ctx, BATCH, PIXELS), *h = x, *scores = NULL, *loss = NULL;
    hpml_tensor  *label = hpml_input(ctx, HPML_DTYPE_I32, 1, (const int64_t[]){ BATCH });
    for (int s = 0; s < SECTIONS; s++) {
        h                 = section(s, h, &scores);
        hpml_tensor *mine = hpml_cross_entropy(scores, label, NULL);
        loss              = s == 0 ? mine : hpml_add(loss, mine);
    }
    hpml_trainer_desc d = { .input = x, .output = scores, .loss_tensor = loss, .target = label,
                            .optimizer = HPML_OPT_ADAM, .lr = 6e-3f,
                            .schedule = { .kind = HPML_SCHEDULE_COSINE, .total_steps = EPOCHS * LEARN / BATCH } };
    return hpml_trainer_fit(hpml_trainer_create(ctx, &d), data, &(hpml_fit_desc){ .epochs = EPOCHS });
}

/* The cloud sends each other section its parameters, in the order in which that section has recorded them. */
static hpml_status deploy(hpml_comm *c, int me)
{
    hpml_ctx *ctx = hpml_comm_ctx(c);
    for (int p = 0; p < hpml_param_count(ctx); p++) {
        hpml_tensor *w     = hpml_param_at(ctx, p);
        const size_t bytes = sizeof(float) * (size_t)hpml_tensor_count(w);
        if (me != CLOUD) hpml_recv(c, CLOUD, 0, w->data, bytes);
        for (int to = DEVICE; me == CLOUD && to < CLOUD; to++)
            if (strncmp(w->name, name_of[to], strlen(name_of[to])) == 0) hpml_send(c, to, 0, w->data, bytes);
    }
    return hpml_ctx_status(ctx);
}

/* What a rank needs to answer samples. */
typedef struct stage {
    hpml_comm   *comm;
    hpml_graph  *graph;
    hpml_tensor *x, *up, *scores;
    int64_t      in, out; /* numbers of a sample in x and in up */
    float        sample[BATCH * PIXELS];
} stage;

/* Returns -sum p log p / log(10) of p = softmax(score); *best: the class with the largest score. */
static double entropy(const float *score, uint8_t *best)
{
    double p[CLASSES], sum = 0, result = 0;
    *best = 0;
    for (int c = 1; c < CLASSES; c++) *best = score[c] > score[*best] ? (uint8_t)c : *best;
    for (int c = 0; c < CLASSES; c++) {
        p[c] = exp((double)score[c] - (double)score[*best]);
        sum += p[c];
    }
    for (int c = 0; c < CLASSES; c++) result -= p[c] > 0 ? p[c] / sum * log(p[c] / sum) : 0;
    return result / log(CLASSES);
}

/* Answers the n samples in s->sample. The rank above gets how many samples follow, even if 0, and then their bits. */
static void answer(stage *s, double threshold, int32_t n, uint8_t *answers, trial *t)
{
    const int     me = hpml_comm_rank(s->comm);
    const int64_t bytes = s->out / 8; /* of a sample's bits */
    uint8_t       bits[BATCH * DEVICE_BITS / 8] = { 0 }, replies[BATCH];
    int32_t       from[BATCH], count = 0;
    if (n > 0) {
        hpml_graph_set_batch(s->graph, n);
        hpml_tensor_set(s->x, s->sample, n * s->in);
        hpml_graph_forward(s->graph, false, 0);
    }
    for (int32_t i = 0; i < n; i++) {
        double unsure = entropy(s->scores->data + i * CLASSES, &answers[i]);
        if (me == CLOUD || unsure < threshold) continue;
        for (int64_t b = 0; b < s->out; b++)
            if (s->up->data[i * s->out + b] > 0) bits[count * bytes + b / 8] |= (uint8_t)(1 << b % 8);
        from[count++] = i;
    }
    t->answered[me] += n - count;
    if (me == CLOUD) return;
    hpml_send(s->comm, me + 1, 0, &count, sizeof count);
    if (count == 0) return;
    hpml_send(s->comm, me + 1, 0, bits, (size_t)(count * bytes));
    hpml_recv(s->comm, me + 1, 0, replies, (size_t)count);
    for (int32_t k = 0; k < count; k++) answers[from[k]] = replies[k];
}

/* Takes a batch: pixels on the device, else bits from the rank below. Returns how many samples the batch has. */
static int32_t take(stage *s, int me, const uint8_t *pixels)
{
    uint8_t bits[BATCH * DEVICE_BITS / 8];
    int32_t n = me == DEVICE ? BATCH : 0;
    if (me != DEVICE && hpml_recv(s->comm, me - 1, 0, &n, sizeof n) == HPML_OK && n > 0)
        hpml_recv(s->comm, me - 1, 0, bits, (size_t)(n * s->in / 8));
    for (int64_t i = 0; i < n * s->in; i++) {
        if (me == DEVICE) s->sample[i] = (float)pixels[i] / 255;
        else s->sample[i] = bits[i / 8] >> i % 8 & 1 ? 1.0f : -1.0f;
    }
    return n;
}

/* All digits of the test, with one T. *t: sums over the ranks, the same on every rank. */
static hpml_status run(stage *s, double threshold, const hpml_dataset *digits, trial *t)
{
    const int     me   = hpml_comm_rank(s->comm);
    hpml_counters sent = { 0 };
    uint8_t       answers[BATCH];
    memset(t, 0, sizeof *t);
    hpml_comm_counters_reset(s->comm);
    for (int64_t first = 0; first < TESTED; first += BATCH) {
        int32_t n = take(s, me, me == DEVICE ? (const uint8_t *)digits->x + first * PIXELS : NULL);
        answer(s, threshold, n, answers, t);
        if (me != DEVICE && n > 0) hpml_send(s->comm, me - 1, 0, answers, (size_t)n);
        for (int i = 0; me == DEVICE && i < BATCH; i++)
            t->right += answers[i] == ((const int32_t *)digits->y)[first + i];
    }
    hpml_comm_counters(s->comm, &sent);
    t->bytes = sent.bytes;
    return hpml_allreduce(s->comm, t, sizeof *t / 8, &(hpml_allreduce_desc){ .element = HPML_ELEMENT_I64 });
}

/* Runs all T on all ranks; the device prints, and checks the smallest T with which it answers 70 % of the samples. */
static hpml_status compare(stage *s, uint64_t seed)
{
    static const double thresholds[TRIALS] = { 0, 0.05, 0.1, 0.2, 0.3, 0.5, 1 };
    const bool          device = hpml_comm_rank(s->comm) == DEVICE;
    hpml_ctx           *ctx    = hpml_comm_ctx(s->comm);
    trial               t[TRIALS];
    int                 best = -1;
    hpml_dataset       *digits = device ? digits_dataset(ctx, 2 * seed + 1, TESTED) : NULL;
    if (device && !digits) return hpml_ctx_status(ctx);
    if (device) printf("   T    device     edge    cloud  accuracy  bytes a sample\n");
    for (int i = 0; i < TRIALS; i++) {
        if (run(s, thresholds[i], digits, &t[i]) != HPML_OK) return hpml_ctx_status(ctx);
        if (best < 0 && 10 * t[i].answered[DEVICE] >= 7 * TESTED) best = i;
        if (!device) continue;
        printf("%4.2f", thresholds[i]);
        for (int r = 0; r < SECTIONS; r++) printf("  %5.1f %%", 100.0 * (double)t[i].answered[r] / TESTED);
        printf("   %5.2f %%  %8.2f\n", 100.0 * (double)t[i].right / TESTED, (double)t[i].bytes / TESTED);
    }
    if (!device) return HPML_OK;
    if (t[0].answered[CLOUD] != TESTED || t[TRIALS - 1].answered[DEVICE] != TESTED)
        return hpml_ctx_fail(ctx, HPML_ERR_STATE, "T 0 must send all samples to the cloud, and T 1 none");
    const double points = 100.0 * (double)(t[best].right - t[0].right) / TESTED;
    const double share  = (double)t[best].bytes / (TESTED * PIXELS); /* of the images' bytes */
    printf("T %g: %.1f %% stay on the device; %+.2f points; 1/%.0f of the images' bytes\n", thresholds[best],
           100.0 * (double)t[best].answered[DEVICE] / TESTED, points, 1 / share);
    if (points >= -1 && share <= 0.1) return HPML_OK;
    return hpml_ctx_fail(ctx, HPML_ERR_STATE, "expected to lose at most 1 point, with 1/10 of the bytes");
}

static hpml_status rank(hpml_comm *c, void *user)
{
    static const int64_t inputs[SECTIONS + 1] = { PIXELS, DEVICE_BITS, EDGE_BITS, 0 };
    const uint64_t       seed = *(uint64_t *)user;
    const int            me   = hpml_comm_rank(c);
    hpml_ctx            *ctx  = hpml_comm_ctx(c);
    stage                s    = { .comm = c };
    if (hpml_comm_size(c) != SECTIONS)
        return hpml_ctx_fail(ctx, HPML_ERR_ARGUMENT, "%d ranks, expected 3: device, edge, cloud", hpml_comm_size(c));
    if (me == CLOUD) train(ctx, seed);
    hpml_share(ctx, true); /* the section that the cloud now records again has the trained weights */
    s.in    = inputs[me];
    s.out   = inputs[me + 1];
    s.x     = hpml_input_2d(ctx, BATCH, s.in);
    s.up    = section(me, s.x, &s.scores);
    s.graph = hpml_graph_create(ctx, &(hpml_graph_desc){ .output_count = me == CLOUD ? 1 : 2, .predict = true,
                                                         .outputs = (hpml_tensor *[]){ s.scores, s.up } });
    if (hpml_graph_alloc(s.graph) != HPML_OK || deploy(c, me) != HPML_OK) return hpml_ctx_status(ctx);
    return compare(&s, seed);
}

int main(int argc, char **argv)
{
    uint64_t         seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    char             error[512];
    hpml_launch_desc d = { .run = "threads:3", .timeout = 600, .ctx = { .seed = seed, .threads = 1 } };
    if (hpml_launch(&d, rank, &seed, error, sizeof error) != HPML_OK) return fprintf(stderr, "%s\n", error), 1;
    return 0;
}
