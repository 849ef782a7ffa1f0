/* What you learn: federated averaging (McMahan et al. 2017). Data stay where they are, a share of the clients trains in
   each round, and the server sees only the sum of their models (Bonawitz et al. 2017). Difficulty 3 of 4.
   cc -O2 examples/21_federated.c -o federated -lm -lpthread && ./federated
   mpicc -O2 -DHPML_USE_MPI examples/21_federated.c -o federated -lm -lpthread && HPML_RUN=mpi mpiexec -n 10 ./federated
   Ten clients, ranks that are threads, each with digits of at most three classes (--mixed: of all classes). In a round
   half of them train some passes over their own digits; the new model is the mean of theirs, weighted by samples. A
   client hides its model: to the numbers, as 64-bit integers, it adds for each other client of the round a random mask
   that the other one subtracts. The masks cancel in the sum, exactly, because integers wrap around.
   prints round, accuracy, bytes; that masked and plain sum have the same bits; exit 1 if not, or below 90 %.
   Not shown: a client that leaves in the middle of a round leaves its masks in the sum. Protocols share keys for that
   case. hpml_plan's strategy "federated" trains in the same way by servers, without masks. */
#define HPML_IMPLEMENTATION
#include "../hpml_comm.h"
#include "digits.h"
#include "options.h"
#include <math.h>

enum { CLASSES = 10, PIXELS = 784, TESTED = 2000, MOST_RANKS = 64 };

typedef struct settings { /* and results, of rank 0 */
    int64_t clients, rounds, passes, batch, samples, seed;
    double  share, lr, goal;
    int     mixed, json, rounds_done, is_exact;
    double  accuracy, bytes;
} settings;

static unsigned char *image; /* (samples + TESTED, PIXELS) */
static int32_t       *label;

static void draw_digits(int64_t samples)
{
    int64_t        count = samples + TESTED;
    unsigned char *class_of = (unsigned char *)malloc((size_t)count);
    image = (unsigned char *)malloc((size_t)count * PIXELS);
    label = (int32_t *)malloc((size_t)count * sizeof *label);
    digits_fill(1, 0, (int)samples, image, class_of);
    digits_fill(1, 1000000000, TESTED, image + samples * PIXELS, class_of + samples);
    for (int64_t i = 0; i < count; i++) label[i] = class_of[i];
    free(class_of);
}

/* One client's digits: two of 2 * clients shards of all, sorted by class; or, mixed, every clients-th one. */
static hpml_dataset *own_digits(hpml_ctx *ctx, const settings *s, int client)
{
    const int64_t  shape = PIXELS, shards = 2 * s->clients;
    unsigned char *x = (unsigned char *)malloc((size_t)s->samples * PIXELS);
    int32_t       *y = (int32_t *)malloc((size_t)s->samples * sizeof *y);
    int64_t        sorted = 0, mine = 0;
    for (int c = 0; c < CLASSES; c++)
        for (int64_t i = 0; i < s->samples; i++) {
            if (label[i] != c) continue;
            int64_t shard = sorted++ * shards / s->samples;
            int64_t owner = hpml_permute_index((uint64_t)s->seed, 0, shards, shard) / 2;
            if ((s->mixed ? i % s->clients : owner) != client) continue;
            memcpy(x + mine * PIXELS, image + i * PIXELS, PIXELS);
            y[mine++] = label[i];
        }
    hpml_dataset *d = hpml_dataset_create(ctx, mine, HPML_DTYPE_U8, 1, &shape, x, HPML_DTYPE_I32, 1, y);
    free(x);
    free(y);
    return d;
}

/* Is `client` one of this round's? Every rank draws the same clients. */
static bool is_drawn(const settings *s, int64_t round, int client)
{
    int64_t count = (int64_t)(s->share * (double)s->clients + 0.5);
    for (int64_t k = 0; k < count; k++)
        if (hpml_permute_index((uint64_t)s->seed + 1, (uint64_t)round, s->clients, k) == client) return true;
    return false;
}

/* Adds to x the masks of `client` with the other clients of the round. Two clients know the seed of their masks, which
   they would agree on by a key exchange; the one with the smaller number adds, the other one subtracts. */
static void add_masks(const settings *s, int64_t round, int client, int64_t *x, int64_t n)
{
    for (int other = 0; other < s->clients; other++) {
        if (other == client || !is_drawn(s, round, other)) continue;
        int64_t  low = client < other ? client : other, high = client < other ? other : client;
        int64_t  number = (round * MOST_RANKS + low) * MOST_RANKS + high;
        hpml_rng pair = { .seed = (uint64_t)s->seed, .stream = (uint64_t)number };
        for (int64_t i = 0; i < n; i++) {
            uint64_t mask = (uint64_t)hpml_rng_u32(&pair) << 32;
            mask |= hpml_rng_u32(&pair);
            x[i] = (int64_t)((uint64_t)x[i] + (client < other ? mask : 0 - mask));
        }
    }
}

/* The new model: sum of samples * weights over the clients of the round, divided by their samples. Sums are integers,
   weights in units of 2^-32. x, plain: (n + 1) scratch; the last element counts samples. */
static hpml_status average(hpml_comm *c, settings *s, int64_t round, float *w, int64_t n, int64_t samples, int64_t *x,
                           int64_t *plain)
{
    const hpml_allreduce_desc integers = { .element = HPML_ELEMENT_I64 };
    const int                 me = hpml_comm_rank(c);
    const bool                takes_part = is_drawn(s, round, me);
    for (int64_t i = 0; i < n; i++) plain[i] = takes_part ? samples * llrint(ldexp((double)w[i], 32)) : 0;
    plain[n] = takes_part ? samples : 0;
    memcpy(x, plain, sizeof *x * (size_t)(n + 1));
    if (takes_part) add_masks(s, round, me, x, n + 1);
    hpml_status status = hpml_allreduce(c, x, n + 1, &integers);
    if (status == HPML_OK && round == 0) { /* for the proof alone: a server gets no plain sums */
        status = hpml_allreduce(c, plain, n + 1, &integers);
        s->is_exact = memcmp(x, plain, sizeof *x * (size_t)(n + 1)) == 0;
    }
    for (int64_t i = 0; i < n; i++) w[i] = (float)ldexp((double)x[i] / (double)x[n], -32);
    return status;
}

static hpml_status client_main(hpml_comm *c, void *user)
{
    settings      s = *(settings *)user;
    hpml_ctx     *ctx = hpml_comm_ctx(c);
    const int64_t shape = PIXELS;
    const hpml_linear_desc relu = { .activation = HPML_ACT_RELU };
    s.clients = hpml_comm_size(c);
    hpml_tensor  *x = hpml_input_2d(ctx, s.batch, PIXELS), *y = hpml_linear(hpml_linear(x, 128, &relu), CLASSES, NULL);
    hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = x, .output = y, .lr = (float)s.lr });
    hpml_dataset *own = own_digits(ctx, &s, hpml_comm_rank(c));
    hpml_dataset *unseen = hpml_dataset_create(ctx, TESTED, HPML_DTYPE_U8, 1, &shape, image + s.samples * PIXELS,
                                               HPML_DTYPE_I32, 1, label + s.samples);
    int64_t  n;
    float   *w = hpml_trainer_array(t, HPML_ARRAY_VALUES, &n); /* the same on all ranks, which have one seed */
    int64_t *sums = (int64_t *)hpml_ctx_alloc(ctx, sizeof *sums * 2 * (size_t)(n + 1), NULL);
    hpml_metrics  m = { 0 };
    hpml_counters sent;
    hpml_status   status = sums ? HPML_OK : hpml_ctx_status(ctx);
    for (int64_t round = 0; round < s.rounds && status == HPML_OK && m.accuracy < s.goal; round++) {
        if (is_drawn(&s, round, hpml_comm_rank(c)))
            status = hpml_trainer_fit(t, own, &(hpml_fit_desc){ .epochs = (int32_t)s.passes });
        if (status == HPML_OK) status = average(c, &s, round, w, n, own->count, sums, sums + n + 1);
        if (status == HPML_OK) status = hpml_trainer_evaluate(t, unseen, &m);
        hpml_comm_counters(c, &sent);
        if (hpml_comm_rank(c) != 0) continue;
        s.rounds_done = (int)round + 1;
        s.accuracy    = m.accuracy;
        s.bytes       = (double)sent.bytes;
        if (!s.json) printf("round %2d  accuracy %.2f %%  %.1f MB sent by rank 0\n", s.rounds_done, 100 * s.accuracy,
                            s.bytes / 1e6);
    }
    if (hpml_comm_rank(c) == 0) *(settings *)user = s;
    return status;
}

int main(int argc, char **argv)
{
    settings s = { .clients = 10, .rounds = 60, .passes = 1, .batch = 16, .samples = 8000, .seed = 1, .share = 0.5,
                   .lr = 0.2, .goal = 0.9 };
    const option table[] = {
        { "--clients", OPTION_COUNT, &s.clients, "N", "ranks; 10" },
        { "--share", OPTION_REAL, &s.share, "X", "fraction of the clients that trains in a round; 0.5" },
        { "--rounds", OPTION_COUNT, &s.rounds, "N", "most rounds; 60" },
        { "--passes", OPTION_COUNT, &s.passes, "N", "passes of a client over its digits in a round; 1" },
        { "--batch", OPTION_COUNT, &s.batch, "N", "samples of a step; 16" },
        { "--samples", OPTION_COUNT, &s.samples, "N", "digits of all clients; 8000" },
        { "--lr", OPTION_REAL, &s.lr, "X", "learning rate; 0.2" },
        { "--goal", OPTION_REAL, &s.goal, "X", "accuracy at which to stop; 0.9" },
        { "--seed", OPTION_COUNT, &s.seed, "N", "of shards, clients and masks; 1" },
        { "--mixed", OPTION_FLAG, &s.mixed, NULL, "every client has digits of all classes" },
        { "--json", OPTION_FLAG, &s.json, NULL, "print one JSON object" },
    };
    char error[512] = "";
    int code = options_read("federated averaging with masks", table, sizeof table / sizeof table[0], argc, argv);
    if (code != 0) return code == 2 ? 2 : 0;
    draw_digits(s.samples);
    hpml_launch_desc d = { .ranks = (int32_t)s.clients, .ctx = { .seed = (uint64_t)s.seed, .threads = 1 } };
    if (hpml_launch(&d, client_main, &s, error, sizeof error) != HPML_OK) return fprintf(stderr, "%s\n", error), 1;
    if (s.json) printf("{\"rounds\": %d, \"accuracy\": %.4f, \"bytes\": %.0f, \"masked_sum_is_exact\": %s}\n",
                       s.rounds_done, s.accuracy, s.bytes, s.is_exact ? "true" : "false");
    else printf("masked and plain sums: %s bits; %d rounds to %.2f %%\n", s.is_exact ? "the same" : "other",
                s.rounds_done, 100 * s.accuracy);
    return !s.is_exact || s.accuracy < s.goal;
}
