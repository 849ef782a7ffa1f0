/* What you learn: a search for hyperparameters on groups of ranks, by successive halving (Jamieson and Talwalkar 2016),
   and an ensemble of the nets that are found. Difficulty 3 of 4.
   cc -O2 examples/38_tune.c -o tune -lm -lpthread && ./tune --check            (HPML_RUN=threads:8 ./tune: more ranks)
   Eight settings of width, depth, learning rate and batch train for one epoch; the better half of them goes on to epoch
   3, the better half of these to epoch 8. In each rung the ranks are split into as many groups as there are settings;
   a group trains its settings one after another by data parallelism, so groups grow as settings are dropped. Sums are
   exact (hpml_plan.exact): any number of ranks gives the same bits. The four best nets average their probabilities.
   prints   losses on digits that validate; loss and accuracy, on others, of the ensemble and of its nets. --check also
            trains all settings to the end, searches on other ranks, trains settings alone, and fails if bits differ, or
            if the search does not find one of the best two settings in at most 45 % of the epochs. */
#define HPML_IMPLEMENTATION
#include "../hpml_comm.h"
#include "digits.h"
#include "options.h"
#include <math.h>

enum { SETTINGS = 8, RUNGS = 3, MEMBERS = 4, SIDE = 14, INPUTS = SIDE * SIDE, CLASSES = 10 };
enum { LEARN = 960, VALID = 320, TEST = 320, ALL = LEARN + VALID + TEST };
static const int until[RUNGS] = { 1, 3, 8 }; /* epochs at the end of a rung */

/* Half of all 16 settings with two values of each, chosen so that each pair of values of two fields occurs twice. */
typedef struct setting { int64_t width, depth, batch; float lr; } setting;
static const setting grid[SETTINGS] = {
    { 8, 1, 16, 0.01f }, { 8, 1, 64, 0.1f }, { 8, 2, 64, 0.01f }, { 8, 2, 16, 0.1f },
    { 48, 1, 64, 0.01f }, { 48, 1, 16, 0.1f }, { 48, 2, 16, 0.01f }, { 48, 2, 64, 0.1f } };

static float   images[ALL * INPUTS]; /* to learn, to validate, to test */
static int32_t labels[ALL];

typedef struct job {
    int      json, all, alone; /* all: no setting is dropped; alone: not 0: only setting alone - 1, for one rung */
    double   loss[RUNGS][SETTINGS]; /* on the validation data; NaN: not trained */
    uint64_t hash[RUNGS][SETTINGS]; /* of weights and momenta */
    int      order[SETTINGS];       /* settings, the best first; those dropped first are last */
    int      epochs, ranks;         /* epochs: of all settings together */
    double   each[2], ensemble[2];  /* loss and accuracy on the test data: means over the members; of the ensemble */
} job;

typedef struct tuner { /* what a rank has */
    hpml_comm    *all;
    hpml_dataset *learn, *valid;
    hpml_trainer *t[SETTINGS];
    job           j;
} tuner;

static void draw(void)
{
    uint8_t image[DIGITS_PIXELS];
    for (int i = 0; i < ALL; i++) {
        labels[i] = digits_draw(5, i, image);
        for (int p = 0; p < DIGITS_PIXELS; p++) /* means of 2 x 2 pixels */
            images[i * INPUTS + p / DIGITS_SIDE / 2 * SIDE + p % DIGITS_SIDE / 2] += (float)image[p] / 1020;
    }
}

static hpml_dataset *digits(hpml_ctx *ctx, int64_t first, int64_t count)
{
    return hpml_dataset_create(ctx, count, HPML_DTYPE_F32, 1, (const int64_t[]){ INPUTS }, images + first * INPUTS,
                               HPML_DTYPE_I32, 1, labels + first);
}

static hpml_trainer *record(hpml_ctx *ctx, int i)
{
    const setting *s = &grid[i];
    hpml_tensor   *x = hpml_input_2d(ctx, s->batch, INPUTS), *h = x;                  /* (B, 196) */
    for (int k = 0; k < s->depth; k++) h = hpml_relu(hpml_linear(h, s->width, NULL)); /* (B, width) */
    return hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = x, .output = hpml_log_softmax(hpml_linear(h, CLASSES, NULL)), .lr = s->lr, .momentum = 0.9f });
}

/* Trains and validates setting i on a group, with the same batches on any number of ranks, and records the run. */
static hpml_status train(tuner *u, hpml_comm *group, int r, int i)
{
    const setting    *s    = &grid[i];
    const hpml_plan   plan = { .exact = true, .global_batch = s->batch, .no_overlap = true };
    hpml_distributed *d    = hpml_distribute(u->t[i], group, &plan);
    hpml_loader      *l    = hpml_loader_create(hpml_comm_ctx(group), u->learn, &(hpml_loader_desc){
        .batch = (int32_t)s->batch, .global_batch = s->batch, .rank = hpml_comm_rank(group),
        .ranks = hpml_comm_size(group), .grain = 8, .no_prefetch = true });
    hpml_metrics      m    = { 0 };
    hpml_batch        batch;
    char              run[3000];
    for (int epoch = r > 0 ? until[r - 1] : 0; epoch < until[r]; epoch++) {
        hpml_loader_seek(l, epoch, 0);
        while (hpml_loader_next(l, &batch) && hpml_trainer_step_batch(u->t[i], &batch, NULL) == HPML_OK) continue;
    }
    hpml_trainer_evaluate(u->t[i], u->valid, &m);
    u->j.loss[r][i] = m.loss; /* a setting that diverges would have ended the search with an error */
    if (u->j.json && hpml_comm_rank(group) == 0 && hpml_distribute_json(d, NULL, run, sizeof run) > 0)
        printf("{\"width\": %d, \"depth\": %d, \"lr\": %g, \"batch\": %d, \"epochs\": %d, \"loss\": %.9g, "
               "\"accuracy\": %.4f, \"run\": %s}\n", (int)s->width, (int)s->depth, (double)s->lr, (int)s->batch,
               until[r], m.loss, m.accuracy, run);
    hpml_loader_free(l);
    hpml_distribute_free(d);
    return hpml_ctx_status(hpml_comm_ctx(group));
}

/* Sends loss and state of setting i from rank `root`, where it was trained, to all ranks. */
static hpml_status share(tuner *u, int r, int i, int root)
{
    uint64_t hash = 14695981039346656037u; /* FNV-1a */
    for (int a = 0; a < 2; a++) {
        int64_t     n;
        float      *x      = hpml_trainer_array(u->t[i], a == 0 ? HPML_ARRAY_VALUES : HPML_ARRAY_STATE, &n);
        hpml_status status = hpml_broadcast(u->all, x, (size_t)n * sizeof *x, root);
        if (status != HPML_OK) return status;
        for (int64_t k = 0; k < n * 4; k++) hash = (hash ^ ((unsigned char *)x)[k]) * 1099511628211u;
    }
    u->j.hash[r][i] = hash;
    hpml_trainer_set_step(u->t[i], until[r] * ((LEARN - 1) / grid[i].batch + 1));
    return hpml_broadcast(u->all, &u->j.loss[r][i], sizeof(double), root);
}

/* Trains the first n settings of u->j.order, each on one of the groups, and puts the best first. */
static hpml_status rung(tuner *u, int r, int n)
{
    const int   p = hpml_comm_size(u->all), rank = hpml_comm_rank(u->all), groups = p < n ? p : n;
    int        *order  = u->j.order;
    hpml_comm  *group  = hpml_comm_split(u->all, rank * groups / p, rank);
    hpml_status status = hpml_ctx_status(hpml_comm_ctx(u->all));
    for (int k = rank * groups / p; k < n && status == HPML_OK; k += groups) status = train(u, group, r, order[k]);
    for (int k = 0; k < n && status == HPML_OK; k++) { /* the first rank of a group sends */
        status = share(u, r, order[k], (k % groups * p + groups - 1) / groups);
        u->j.epochs += until[r] - (r > 0 ? until[r - 1] : 0);
    }
    hpml_comm_free(group);
    for (int k = 1; k < n; k++) { /* insertion sort */
        int i = order[k], q = k;
        for (; q > 0 && u->j.loss[r][i] < u->j.loss[r][order[q - 1]]; q--) order[q] = order[q - 1];
        order[q] = i;
    }
    return status;
}

/* Adds loss and accuracy of probabilities p (TEST, CLASSES), times a weight, to out. */
static void judge(const float *p, double weight, double out[2])
{
    for (int s = 0; s < TEST; s++, p += CLASSES) {
        const int32_t right = labels[LEARN + VALID + s];
        int           best  = 0;
        for (int k = 1; k < CLASSES; k++) best = p[k] > p[best] ? k : best;
        out[0] -= weight / TEST * log((double)p[right]);
        out[1] += weight / TEST * (best == right);
    }
}

/* The ensemble: rank k, modulo the ranks, computes net k; then each rank adds up all of them in the same order. */
static hpml_status vote(tuner *u)
{
    enum { N = TEST * CLASSES };
    float       p[N] = { 0 }, mean[N] = { 0 };
    hpml_status status = HPML_OK;
    for (int k = 0; k < MEMBERS && status == HPML_OK; k++) {
        const int root = k % hpml_comm_size(u->all);
        if (hpml_comm_rank(u->all) == root)
            hpml_trainer_predict(u->t[u->j.order[k]], images + (LEARN + VALID) * INPUTS, TEST, p);
        status = hpml_broadcast(u->all, p, sizeof p, root);
        for (int i = 0; i < N; i++) {
            p[i] = expf(p[i]);
            mean[i] += p[i] / MEMBERS;
        }
        judge(p, 1.0 / MEMBERS, u->j.each);
    }
    judge(mean, 1, u->j.ensemble);
    return status;
}

static hpml_status search(hpml_comm *c, void *user)
{
    hpml_ctx *ctx = hpml_comm_ctx(c);
    tuner     u   = { c, digits(ctx, 0, LEARN), digits(ctx, LEARN, VALID), { NULL }, *(job *)user };
    const int rungs = u.j.alone ? 1 : RUNGS, settings = u.j.alone ? 1 : SETTINGS;
    u.j.ranks = hpml_comm_size(c);
    for (int i = 0; i < SETTINGS; i++) {
        u.t[i]       = record(ctx, i); /* all, in one order: initial values depend on it */
        u.j.order[i] = u.j.alone ? u.j.alone - 1 : i;
        for (int r = 0; r < RUNGS; r++) u.j.loss[r][i] = NAN;
    }
    hpml_status status = hpml_ctx_status(ctx);
    for (int r = 0; r < rungs && status == HPML_OK; r++) status = rung(&u, r, u.j.all ? settings : settings >> r);
    if (status == HPML_OK && !u.j.alone) status = vote(&u);
    if (status == HPML_OK && hpml_comm_rank(c) == 0) *(job *)user = u.j;
    return status;
}

static bool start(job *j, const char *run)
{
    hpml_launch_desc d = { .run = run, .alone = true, .ctx = { .seed = 1, .threads = 1, .log = hpml_log_stderr } };
    return hpml_launch(&d, search, j, NULL, 0) == HPML_OK;
}

static void print(const job *j)
{
    printf("width depth   lr batch   loss after 1, %d, %d epochs\n", until[1], until[2]);
    for (int k = 0; k < SETTINGS; k++) {
        const int i = j->order[k];
        printf("%5d %5d %4g %5d  ", (int)grid[i].width, (int)grid[i].depth, (double)grid[i].lr, (int)grid[i].batch);
        for (int r = 0; r < RUNGS && j->loss[r][i] >= 0; r++) printf("%8.4f", j->loss[r][i]);
        printf("\n");
    }
    printf("%d epochs of %d\n", j->epochs, SETTINGS * until[RUNGS - 1]);
    printf("ensemble of %d: loss %.3f, accuracy %.1f %%; its nets on average %.3f, %.1f %%\n", MEMBERS, j->ensemble[0],
           100 * j->ensemble[1], j->each[0], 100 * j->each[1]);
}

/* Compares the search with others, and with all settings trained to the end. Returns what is wrong; NULL: nothing. */
static const char *check(const job *j)
{
    static const char *const run[] = { "serial", "threads:2" };
    job all = { .all = 1 };
    int place = 0;
    unsetenv("HPML_RUN"); /* which would replace the ranks that this function names */
    for (int k = 0; k < 2; k++) {
        job again = { 0 };
        if (!start(&again, run[k])) return "the search failed";
        if (memcmp(again.loss, j->loss, sizeof j->loss) != 0 || memcmp(again.hash, j->hash, sizeof j->hash) != 0 ||
            again.ensemble[0] != j->ensemble[0]) return "another number of ranks gives another answer";
    }
    for (int i = 0; i < 4; i++) {
        job alone = { .alone = i + 1 };
        if (!start(&alone, "serial")) return "a run failed";
        if (alone.hash[0][i] != j->hash[0][i]) return "a setting trained alone has other weights";
    }
    if (!start(&all, "threads:4")) return "the grid failed";
    while (all.order[place] != j->order[0]) place++;
    printf("checked: same bits on 1, 2 and %d ranks, and alone; number %d of the grid\n", j->ranks, place + 1);
    if (place > 1) return "the setting found is not one of the best two";
    if (j->epochs > 0.45 * all.epochs) return "the search took more than 45 % of the epochs";
    if (j->ensemble[0] > j->each[0] || j->ensemble[1] < j->each[1]) return "the ensemble is worse than its members";
    return NULL;
}

int main(int argc, char **argv)
{
    job          j = { 0 };
    int          checks = 0;
    const option table[] = {
        { "--check", OPTION_FLAG, &checks, NULL, "compares with the whole grid and with other numbers of ranks" },
        { "--json", OPTION_FLAG, &j.json, NULL, "a JSON object for each run, in front of the table" } };
    int failed = options_read("Hyperparameters by successive halving on groups of ranks.", table, 2, argc, argv);
    if (failed) return failed == 1 ? 0 : failed;
    draw();
    if (!start(&j, "threads:4")) return 1;
    if (j.ranks == 0) return 0; /* a process of mpiexec that is not rank 0 */
    print(&j);
    const char *why = checks ? check(&j) : NULL;
    if (why) fprintf(stderr, "%s\n", why);
    return why != NULL;
}
