/* What you learn: map, combine, shuffle, reduce; and why the loss of a worker costs little when shards of the data are
   functions of numbers. Difficulty 3 of 4.
   cc -O2 examples/33_map_reduce.c -o count -lm -lpthread && ./count        (or ./count WORDS, of each shard)
   mpicc -O2 -DHPML_USE_MPI examples/33_map_reduce.c -o count -lm -lpthread && HPML_RUN=mpi mpiexec -n 4 ./count
   MapReduce (Dean & Ghemawat 2004; examples/map_reduce.h): map turns each shard into pairs (key, value); the shuffle
   sends all pairs of a key to one rank, which reduces them to one; a combiner reduces each shard's pairs before. Here
   one function counts words and adds up the gradient of a model.
   Resilient datasets (Zaharia et al. 2012; examples/resilient.h): rank 0 drives a training, workers keep shards in
   memory. One fails in the middle of an epoch; others make its shards again from (seed, epoch, number).
   prints   gradient: 460896 bytes, combined 2400; pairs: 200.0 times fewer   and so on. Exit 1 with a sentence if
   results are not those of a serial loop, bit for bit, or bytes not what the pairs that leave a rank take.
   HPML_RUN=clock:4 or threads:8 chooses the ranks. */
#define HPML_IMPLEMENTATION
#include "../hpml_comm.h"
#include "map_reduce.h"
#include "resilient.h"
#include <math.h>

enum { SHARDS = 12, SAMPLES = 200, WEIGHTS = 8, VOCABULARY = 1500, EPOCHS = 3, STEPS = 10 };

/* ---- shards: functions of (seed, epoch, number) ---- */

static uint64_t stream(int epoch, int number) { return (uint64_t)(epoch * SHARDS + number); }

/* Small numbers are likely, as common words are in a language. */
static int draw_word(hpml_rng *rng)
{
    const double u = (double)hpml_rng_uniform(rng);
    return (int)(u * u * u * VOCABULARY);
}

typedef struct sample { double x[WEIGHTS], y; } sample;

/* Multiples of 1/16, so that the sums of gradients at w = 0 are exact in any order. */
static void draw_samples(int epoch, int number, sample *s) /* (SAMPLES) */
{
    hpml_rng rng = { .seed = 1, .stream = stream(epoch, number) };
    for (int i = 0; i < SAMPLES; i++) {
        s[i].y = round((double)hpml_rng_normal(&rng)) / 16; /* noise */
        for (int k = 0; k < WEIGHTS; k++) {
            s[i].x[k] = round(16 * (double)hpml_rng_normal(&rng)) / 16;
            s[i].y += (k - 3) * s[i].x[k];
        }
    }
}

/* The gradient of one sample's squared error: (w x - y) x. */
static void sample_gradient(const sample *s, const double *w, double *g)
{
    double error = -s->y;
    for (int k = 0; k < WEIGHTS; k++) error += w[k] * s->x[k];
    for (int k = 0; k < WEIGHTS; k++) g[k] = error * s->x[k];
}

static void shard_gradient(const sample *s, const double *w, double *sum)
{
    double g[WEIGHTS];
    memset(sum, 0, sizeof g);
    for (int i = 0; i < SAMPLES; i++) {
        sample_gradient(&s[i], w, g);
        for (int k = 0; k < WEIGHTS; k++) sum[k] += g[k];
    }
}

/* Runs a job without and with a combiner. expected: this rank's results; leaving: pairs that must leave their rank. */
static hpml_status compare(hpml_comm *c, const char *name, map_fn *map, const void *user, bag *expected,
                           const int64_t *leaving)
{
    static const hpml_allreduce_desc sum = { .element = HPML_ELEMENT_I64 };
    const int64_t ranks = hpml_comm_size(c), counts = ranks * (ranks - 1) * (int64_t)sizeof(int64_t);
    int64_t       bytes[2], wrong = 0;
    reduce(expected, 0);
    for (int combine = 0; combine < 2; combine++) {
        hpml_counters k;
        bag           out = { 0 };
        hpml_comm_counters_reset(c);
        if (map_reduce(c, SHARDS, map, user, combine, &out) != HPML_OK) return hpml_ctx_status(hpml_comm_ctx(c));
        hpml_comm_counters(c, &k);
        bytes[combine] = k.bytes;
        wrong += out.count != expected->count;
        for (int64_t i = 0; i < out.count && wrong == 0; i++) {
            wrong += strcmp(out.pair[i].key, expected->pair[i].key) != 0;
            wrong += out.pair[i].value != expected->pair[i].value;
        }
        free(out.pair);
    }
    free(expected->pair);
    hpml_allreduce(c, bytes, 2, &sum);
    hpml_allreduce(c, &wrong, 1, &sum);
    for (int k = 0; k < 2; k++) wrong += bytes[k] != leaving[k] * (int64_t)sizeof(pair) + counts;
    if (hpml_comm_rank(c) == 0)
        printf("%s: %lld bytes, combined %lld; pairs: %.1f times fewer\n", name, (long long)bytes[0],
               (long long)bytes[1], (double)leaving[0] / fmax((double)leaving[1], 1));
    if (wrong == 0) return HPML_OK;
    return hpml_ctx_fail(hpml_comm_ctx(c), HPML_ERR_STATE, "%s: not what a serial loop computes, or %lld and %lld "
                         "bytes where %lld and %lld pairs leave their ranks", name, (long long)bytes[0],
                         (long long)bytes[1], (long long)leaving[0], (long long)leaving[1]);
}

/* ---- word count ---- */

static const char *name_word(int number, char *name) /* such as "lenode" */
{
    static const char *const part[12] = { "ba", "de", "fi", "go", "hu", "ka", "le", "mi", "no", "pu", "ra", "se" };
    snprintf(name, 8, "%s%s%s", part[number / 144 % 12], part[number / 12 % 12], part[number % 12]);
    return name;
}

static void map_words(int shard, const void *user, bag *out)
{
    hpml_rng rng = { .seed = 1, .stream = stream(0, shard) };
    char     name[8];
    for (int64_t i = 0; i < *(const int64_t *)user; i++) emit(out, name_word(draw_word(&rng), name), shard, 1);
}

static hpml_status count_words(hpml_comm *c, int64_t words)
{
    const int ranks = hpml_comm_size(c), rank = hpml_comm_rank(c);
    int64_t   all[VOCABULARY] = { 0 }, mine[VOCABULARY], leaving[2] = { 0 };
    bag       expected = { 0 };
    char      name[8];
    for (int s = 0; s < SHARDS; s++) {
        hpml_rng rng = { .seed = 1, .stream = stream(0, s) };
        memset(mine, 0, sizeof mine);
        for (int64_t i = 0; i < words; i++) mine[draw_word(&rng)]++;
        for (int w = 0; w < VOCABULARY; w++) {
            all[w] += mine[w];
            if (owner(name_word(w, name), ranks) == s % ranks) continue;
            leaving[0] += mine[w];
            leaving[1] += mine[w] > 0;
        }
    }
    for (int w = 0; w < VOCABULARY; w++)
        if (all[w] > 0 && owner(name_word(w, name), ranks) == rank) emit(&expected, name, 0, (double)all[w]);
    return compare(c, "word count", map_words, &words, &expected, leaving);
}

/* ---- the gradient of a model, at w = 0 ---- */

static const char *name_weight(int k, char *name)
{
    snprintf(name, 8, "w%d", k);
    return name;
}

static void map_gradient(int shard, const void *user, bag *out)
{
    sample s[SAMPLES];
    double g[WEIGHTS];
    char   name[8];
    draw_samples(0, shard, s);
    for (int i = 0; i < SAMPLES; i++) {
        sample_gradient(&s[i], (const double *)user, g);
        for (int k = 0; k < WEIGHTS; k++) emit(out, name_weight(k, name), shard, g[k]);
    }
}

static hpml_status gradient(hpml_comm *c)
{
    const int    ranks = hpml_comm_size(c), rank = hpml_comm_rank(c);
    const double w[WEIGHTS] = { 0 };
    double       g[WEIGHTS], all[WEIGHTS] = { 0 };
    int64_t      leaving[2] = { 0 };
    sample       samples[SAMPLES];
    bag          expected = { 0 };
    char         name[8];
    for (int s = 0; s < SHARDS; s++) {
        draw_samples(0, s, samples);
        shard_gradient(samples, w, g);
        for (int k = 0; k < WEIGHTS; k++) {
            all[k] += g[k];
            leaving[1] += owner(name_weight(k, name), ranks) != s % ranks;
        }
    }
    leaving[0] = leaving[1] * SAMPLES; /* a pair for each sample */
    for (int k = 0; k < WEIGHTS; k++)
        if (owner(name_weight(k, name), ranks) == rank) emit(&expected, name, 0, all[k]);
    return compare(c, "gradient", map_gradient, w, &expected, leaving);
}

/* ---- a training whose shards survive the loss of a rank ---- */

static void make(int epoch, int number, void *shard) { draw_samples(epoch, number, (sample *)shard); }
static void compute(const void *shard, const double *w, double *g) { shard_gradient((const sample *)shard, w, g); }

static void descend(double *w, const double *g)
{
    for (int k = 0; k < WEIGHTS; k++) w[k] -= 0.3 / (SHARDS * SAMPLES) * g[k];
}

/* Trains; with `fails`, the last worker fails in the middle of the second epoch. serial: weights of a serial loop. */
static hpml_status train(hpml_comm *c, bool fails)
{
    static const resilient_desc d = { SHARDS, sizeof(sample[SAMPLES]), WEIGHTS, WEIGHTS, make, compute };
    const int  ranks = hpml_comm_size(c), rank = hpml_comm_rank(c), lost = fails && ranks > 2 ? ranks - 1 : 0;
    double     w[WEIGHTS] = { 0 }, serial[WEIGHTS] = { 0 }, g[WEIGHTS], all[WEIGHTS];
    sample     samples[SAMPLES];
    if (rank > 0) return resilient_work(c, &d, rank == lost ? STEPS + STEPS / 2 : 0);
    resilient *v = resilient_create(c, &d);
    for (int step = 0; v && step < EPOCHS * STEPS; step++) {
        if (resilient_sum(v, step / STEPS, w, g) != HPML_OK) break;
        descend(w, g);
        memset(all, 0, sizeof all);
        for (int s = 0; s < SHARDS; s++) {
            make(step / STEPS, s, samples);
            compute(samples, serial, g);
            for (int k = 0; k < WEIGHTS; k++) all[k] += g[k];
        }
        descend(serial, all);
    }
    if (hpml_ctx_status(hpml_comm_ctx(c)) != HPML_OK) return hpml_ctx_status(hpml_comm_ctx(c));
    const bool equal = memcmp(w, serial, sizeof w) == 0;
    const int  made  = (int)v->made, moved = (int)v->moved, expected = ranks > 1 ? EPOCHS * SHARDS + moved : 0;
    printf("training, workers lost: %d; %d shards made, %d of them again; %s bits\n", v->lost, made, moved,
           equal ? "the same" : "other");
    const bool right = equal && made == expected && v->lost == (lost > 0) && fabs(w[WEIGHTS - 1] - WEIGHTS + 4) < 0.1;
    resilient_end(v);
    if (right) return HPML_OK;
    return hpml_ctx_fail(hpml_comm_ctx(c), HPML_ERR_STATE, "training: w7 is %.17g, of a serial loop %.17g; %d shards "
                         "made, expected %d", w[WEIGHTS - 1], serial[WEIGHTS - 1], made, expected);
}

typedef struct job { int64_t words; bool done; } job; /* done: set by rank 0 */

static hpml_status rank_main(hpml_comm *c, void *user)
{
    job        *j      = (job *)user;
    hpml_status status = count_words(c, j->words);
    if (status == HPML_OK) status = gradient(c);
    if (status == HPML_OK) status = train(c, false);
    if (status == HPML_OK) status = train(c, true);
    if (hpml_comm_rank(c) == 0) j->done = status == HPML_OK;
    return status;
}

int main(int argc, char **argv)
{
    char   error[768] = "", *end = NULL;
    int    me    = 0;
    double words = argc > 1 ? strtod(argv[1], &end) : 5000;
    job    j     = { 0 };
    if (argc > 2 || (end && *end) || !(words >= 1 && words <= 1e6))
        return fprintf(stderr, "usage: count [WORDS]; WORDS: of each shard, 1 to 1000000\n"), 2;
    j.words = (int64_t)words;
    hpml_launch_desc l = { .run = hpml_launched(&me) > 1 ? "mpi" : "threads:4", .survive = true, .ctx.threads = 1 };
    hpml_launch(&l, rank_main, &j, error, sizeof error);
    if (error[0]) printf("%s\n", error);
    return me == 0 && !j.done; /* under mpiexec the exit status of the other processes says nothing */
}
