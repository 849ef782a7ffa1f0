/* Strategies on parameter servers: the bits of serial and synchronous training where they are promised, the bytes, the
   bound on staleness, who is waited for, and that a training goes on when workers are lost. Virtual time makes each run
   repeatable. */
#include "../hpml_comm.h"
#include "test.h"
#include "toy_points.h"
#include <signal.h>
#include <unistd.h>
#ifdef HPML_USE_MPI
#include <mpi.h>
#endif
#include "mlp.h"

enum { MOST_RANKS = 24 };

/* A training: what, how, on which ranks; and what came of it. */
typedef struct job {
    const char         *plan;     /* in words */
    int                 ranks;
    hpml_transport_kind transport;
    hpml_network        net;
    bool                survive, digits; /* digits: else points */
    bool                own_data; /* each rank trains on all of its data set, which is its own */
    bool                sorted;   /* own_data: two classes of digits a rank */
    int                 samples, batch, epochs; /* batch: of a rank */
    bool                step_by_step; /* by hpml_trainer_step, not fit: no dealing */
    hpml_opt            opt;
    float               lr, momentum;
    double              goal;     /* accuracy at which the training ends */
    double              step_s;   /* virtual seconds of a gradient */
    int                 lost[4], lost_step[4]; /* 1 + rank that leaves after so many steps; 0: none */
    bool                fails, quiet; /* fails: .lost fail, they do not leave; quiet: an error is not printed */
    bool                killed;   /* .lost are killed, with MPI */
    double              timeout;  /* seconds; 0: 30 */
    const char         *save, *load;
    bool                twice;    /* as many epochs again, after finish */
    int                 max_steps; /* of fit; 0: no limit */
    bool                no_finish; /* the training ends without hpml_distribute_finish */
    int                 judge;     /* the rank that evaluates the trained model */
    /* results */
    uint64_t            hash[MOST_RANKS]; /* of the parameters of each rank after finish */
    double              accuracy, loss, end; /* of rank `judge` */
    double              first_free;          /* virtual time when the fit of rank 0 is over */
    int64_t             steps[MOST_RANKS];
    int64_t             sent[MOST_RANKS]; /* bytes */
    int64_t             pushed[MOST_RANKS], lead; /* steps that began to push; the most that a rank was ahead of it */
    int                 rounds, computed[MOST_RANKS]; /* gradients */
    char                error[700], why[700]; /* of the first rank that failed; of rank 0 */
} job;

typedef struct watch { job *j; hpml_comm *c; hpml_distributed *d; int rank, servers, period; int64_t asked; } watch;

/* After each step: takes the time of a gradient, if there was one, and notes how far this rank is ahead; a rank that is
   to be lost stops here. */
static int each_step(const hpml_step_info *info, void *user)
{
    watch    *w = (watch *)user;
    job      *j = w->j;
    const int workers = j->ranks - w->servers;
    (void)info;
    j->steps[w->rank]++;
    const int64_t asked = w->rank < workers ? hpml_comm_messages_to(w->c, workers) : 0;
    j->computed[w->rank] += asked > w->asked;
    for (int i = 0; i < 4; i++) {
        if (j->lost[i] != w->rank + 1 || j->steps[w->rank] < j->lost_step[i]) continue;
        if (j->killed) kill(getpid(), SIGKILL);
        return 1;
    }
    if (w->rank >= workers) return 0;
    for (int k = 0; k < workers && j->transport == HPML_TRANSPORT_CLOCK; k++) /* one thread runs at a time */
        if (j->steps[w->rank] - 1 - j->pushed[k] > j->lead) j->lead = j->steps[w->rank] - 1 - j->pushed[k];
    if (asked > w->asked && j->transport == HPML_TRANSPORT_CLOCK) hpml_comm_compute(w->c, j->step_s);
    w->asked           = asked;
    j->pushed[w->rank] = j->steps[w->rank];
    return 0;
}

static hpml_dataset *data_of(const job *j, hpml_ctx *ctx, int rank, int workers)
{
    if (!j->digits) {
        hpml_dataset *all = points(ctx, j->samples, 0, 0, 0);
        const int64_t part = j->samples / workers, first = part * (rank < workers ? rank : 0), inputs = INPUTS;
        if (!j->own_data) return all;
        return hpml_dataset_create(ctx, part, HPML_DTYPE_F32, 1, &inputs, (const float *)all->x + first * INPUTS,
                                   HPML_DTYPE_I32, 1, (const int32_t *)all->y + first);
    }
    if (!j->own_data) return digits(ctx, 0, j->samples ? j->samples : to_learn);
    const int      own = to_learn / workers;
    const int64_t  shape = 784;
    unsigned char *x = (unsigned char *)malloc((size_t)own * 784);
    int32_t       *y = (int32_t *)malloc((size_t)own * sizeof *y);
    int            k = 0, n = 0;
    if (rank >= workers) rank = 0;
    for (int pass = 0; pass < (j->sorted ? 10 : 1); pass++) /* sorted by class, two of 2 x workers pieces each */
        for (int i = 0; i < to_learn; i++) {
            if (j->sorted && labels[i] != pass) continue;
            int64_t piece = (int64_t)n++ * 2 * workers / to_learn;
            if (hpml_permute_index(5, 0, 2 * workers, piece) / 2 != rank || k >= own) continue;
            memcpy(x + (size_t)k * 784, images + (size_t)i * 784, 784);
            y[k++] = labels[i];
        }
    hpml_dataset *d = hpml_dataset_create(ctx, k, HPML_DTYPE_U8, 1, &shape, x, HPML_DTYPE_I32, 1, y);
    free(x);
    free(y);
    return d;
}

static hpml_trainer *trainer_of(const job *j, hpml_ctx *ctx)
{
    hpml_tensor *x = hpml_input_2d(ctx, j->batch, j->digits ? 784 : INPUTS), *y;
    if (j->digits) y = mlp(x);
    else y = hpml_linear(hpml_linear(x, 31, &(hpml_linear_desc){ .activation = HPML_ACT_RELU }), CLASSES, NULL);
    return hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = x, .output = y, .lr = j->lr, .optimizer = j->opt,
                                                          .momentum = j->momentum });
}

/* The steps of one epoch, by hpml_trainer_step on this rank's shard, a server's is empty. */
static hpml_status step_by_step(job *j, hpml_trainer *t, hpml_dataset *data, watch *w)
{
    const int        workers = j->ranks - w->servers;
    hpml_loader_desc of = { .batch = j->batch, .rank = w->rank < workers ? w->rank : workers, .ranks = workers };
    hpml_loader     *l = hpml_loader_create(hpml_comm_ctx(w->c), data, &of);
    hpml_step_info   info;
    hpml_batch       b;
    hpml_status      status = HPML_OK;
    while (status == HPML_OK && hpml_loader_next(l, &b)) {
        status = hpml_trainer_step(t, b.x, b.y, b.samples, &info);
        if (status == HPML_OK && each_step(&info, w) != 0) status = HPML_ERR_STOPPED;
    }
    hpml_loader_free(l);
    return status;
}

static hpml_status epochs(job *j, hpml_trainer *t, hpml_dataset *data, watch *w)
{
    hpml_loader_desc of = { .ranks = j->own_data };
    hpml_fit_desc    d  = { .epochs = j->epochs, .max_steps = j->max_steps, .on_step = each_step, .user = w };
    hpml_metrics     m  = { 0 };
    d.loader = j->own_data ? &of : NULL;
    if (j->step_by_step) return step_by_step(j, t, data, w);
    if (j->goal == 0) return hpml_trainer_fit(t, data, &d);
    d.epochs = (int32_t)(w->period * j->batch / (to_learn / (j->ranks - w->servers))); /* of a round */
    for (int e = 0; e < j->epochs && m.accuracy < j->goal; e++) { /* all ranks end together */
        hpml_status status = hpml_trainer_fit(t, data, &d);
        if (status == HPML_OK) status = hpml_distribute_finish(w->d);
        if (status == HPML_OK && w->rank == 0)
            status = hpml_trainer_evaluate(t, digits(hpml_comm_ctx(w->c), to_learn, TESTED), &m);
        if (status == HPML_OK) status = hpml_broadcast(w->c, &m.accuracy, sizeof m.accuracy, 0);
        if (status != HPML_OK) return status;
        if (w->rank == 0) j->rounds = e + 1;
    }
    return HPML_OK;
}

static hpml_status work(hpml_comm *c, void *user)
{
    job          *j    = (job *)user;
    const int     rank = hpml_comm_rank(c);
    hpml_ctx     *ctx  = hpml_comm_ctx(c);
    hpml_trainer *t    = trainer_of(j, ctx);
    hpml_plan     plan = { 0 };
    hpml_metrics  m    = { 0 };
    hpml_plan_parse(j->plan ? j->plan : "", &plan, NULL, 0);
    watch             w = { j, c, NULL, rank, plan.servers, plan.period, 0 };
    hpml_dataset     *data = data_of(j, ctx, rank, j->ranks - plan.servers);
    hpml_distributed *d = j->plan ? hpml_distribute(t, c, &plan) : NULL;
    if (j->load && d) hpml_distribute_load(d, j->load);
    hpml_comm_counters_reset(c);
    w.d     = d;
    w.asked = 0;
    hpml_status status = hpml_ctx_status(ctx) == HPML_OK ? epochs(j, t, data, &w) : hpml_ctx_status(ctx);
    if (rank == 0) j->first_free = hpml_comm_now(c);
    if (j->twice && status == HPML_OK) status = hpml_distribute_finish(d);
    if (j->twice && status == HPML_OK) status = epochs(j, t, data, &w);
    hpml_counters sent;
    hpml_comm_counters(c, &sent);
    j->sent[rank] = sent.bytes;
    if (status == HPML_ERR_STOPPED) return j->fails ? hpml_ctx_fail(ctx, HPML_ERR_STATE, "on purpose") : HPML_OK;
    if (status == HPML_OK && j->save && d) status = hpml_distribute_save(d, j->save);
    if (status == HPML_OK && d && !j->no_finish) status = hpml_distribute_finish(d);
    if (j->digits) data = digits(ctx, to_learn, TESTED);
    if (rank == j->judge && status == HPML_OK) status = hpml_trainer_evaluate(t, data, &m);
    if (status != HPML_OK && rank == 0) snprintf(j->why, sizeof j->why, "%s", hpml_ctx_error(ctx));
    if (status != HPML_OK) return status;
    j->hash[rank] = hpml_param_hash(ctx);
    if (rank == j->judge) {
        j->accuracy = m.accuracy;
        j->loss     = m.loss;
        j->end      = hpml_comm_now(c);
    }
    return HPML_OK;
}

static bool go(job *j)
{
    hpml_launch_desc l = { .ranks = j->ranks, .transport = j->transport, .network = j->net };
    l.timeout = j->timeout;
    if (j->timeout == 0 && j->transport != HPML_TRANSPORT_CLOCK) l.timeout = 30; /* virtual time: none */
    if (j->batch == 0) j->batch = 6;
    if (j->samples == 0 && !j->digits) j->samples = 200;
    if (j->epochs == 0) j->epochs = 1;
    if (j->lr == 0) j->lr = 0.1f;
    l.ctx.threads = 1;
    l.ctx.seed    = 1;
    memset(j->hash, 0, sizeof j->hash);
    memset(j->steps, 0, sizeof j->steps);
    memset(j->pushed, 0, sizeof j->pushed);
    memset(j->computed, 0, sizeof j->computed);
    if (j->digits) get_digits(8000);
    l.survive = j->survive;
    l.alone   = true; /* with mpiexec each process has threads, too */
    bool good = hpml_launch(&l, work, j, j->error, sizeof j->error) == HPML_OK;
    if (!good && !j->quiet) printf("    %s: %s\n", j->plan ? j->plan : "serial", j->error);
    return good;
}

#ifdef HPML_USE_MPI
static int me;

static void mpi_end(void) { MPI_Finalize(); }

__attribute__((constructor)) static void mpi_begin(void)
{
    int level;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &me);
    atexit(mpi_end);
}

/* Two workers and a server, or three ranks, are processes: the bits of threads, where threads promise their bits. */
TEST(processes_of_mpiexec_train_as_threads_do)
{
    static const char *const plans[] = { "strategy=ps,servers=1", "strategy=ps,servers=2,codec=onebit",
                                         "strategy=ssp,servers=1", "strategy=federated,servers=1,period=2",
                                         "strategy=ssp,staleness=2,servers=1", "strategy=async,servers=1",
                                         "strategy=backup,backup=1,servers=1" };
    for (int p = 0; p < 7; p++) {
        job own = { .plan = plans[p], .ranks = 3, .transport = HPML_TRANSPORT_MPI, .own_data = p == 3, .epochs = 2 };
        ENSURE(go(&own) && own.hash[me] != 0);
        job threads = own;
        threads.transport = HPML_TRANSPORT_THREADS;
        ENSURE(go(&threads) && (p > 3 || own.hash[me] == threads.hash[0]));
    }
}

/* One worker's process is killed at a random step; the others end the training. HPML_KILL is the seed. Run by
   storm_servers.sh, with mpiexec -disable-auto-cleanup. */
TEST(processes_that_are_killed_are_lost)
{
    static const char *const plans[] = { "strategy=ps,servers=1", "strategy=async,servers=2",
                                         "strategy=backup,backup=1,servers=1", "strategy=ssp,staleness=2,servers=1",
                                         "strategy=federated,servers=1,period=5", "strategy=gossip,topology=all" };
    const char *seed = getenv("HPML_KILL");
    if (!seed) SKIP("HPML_KILL has no seed");
    hpml_rng  r = { .seed = (uint64_t)atoi(seed) };
    const int p = (int)hpml_rng_below(&r, 6);
    int       size;
    job       j = { .plan = plans[p], .ranks = 5, .transport = HPML_TRANSPORT_MPI, .own_data = p == 4 };
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    ENSURE(size == 5);
    j.survive = j.killed = true, j.timeout = 3, j.epochs = 20, j.samples = 480;
    j.lost[0]      = 1 + (int)hpml_rng_below(&r, 3);
    j.lost_step[0] = 1 + (int)hpml_rng_below(&r, 60);
    j.judge        = j.lost[0] == 1; /* rank 0, or 1 if rank 0 is killed */
    job calm     = j;
    calm.survive = calm.killed = false;
    calm.lost[0] = 0;
    calm.timeout = 30;
    ENSURE(go(&calm));
    const bool good = go(&j) && j.hash[me] != 0;
    printf("%s rank %d of 5: %s, rank %d killed after step %d\n", good ? "good" : "BAD", me, plans[p], j.lost[0] - 1,
           j.lost_step[0]);
    if (good && me == j.judge) printf("loss %.5f %.5f %s\n", j.loss, calm.loss, plans[p]);
    fflush(stdout);
    _exit(!good); /* MPI_Finalize would wait for the process that was killed */
}
#else
static const hpml_transport_kind transports[] = { HPML_TRANSPORT_THREADS, HPML_TRANSPORT_CLOCK };

static bool same_hashes(const job *j)
{
    for (int r = 1; r < j->ranks; r++)
        if (j->hash[r] != j->hash[0]) return false;
    return true;
}

/* ---- the same bits ---- */

TEST(one_worker_and_servers_train_with_the_bits_of_serial_training)
{
    static const struct { hpml_opt opt; float momentum; } rows[] = {
        { HPML_OPT_SGD, 0 }, { HPML_OPT_SGD, 0.9f }, { HPML_OPT_ADAGRAD, 0 }, { HPML_OPT_ADAM, 0 } };
    static const char *const plans[] = { "strategy=ps,servers=%d", "strategy=ssp,staleness=2,servers=%d",
                                         "strategy=ssp,servers=%d", "strategy=async,servers=%d",
                                         "strategy=federated,servers=%d" };
    for (int o = 0; o < 4; o++) {
        job serial = { .ranks = 1, .opt = rows[o].opt, .momentum = rows[o].momentum, .epochs = 2 };
        ENSURE(go(&serial));
        for (int p = 0; p < 5; p++)
            for (int servers = 1; servers <= (o == 3 ? 3 : 1); servers++) {
                char text[80];
                job  j = serial;
                snprintf(text, sizeof text, plans[p], servers);
                j.plan = text, j.ranks = 1 + servers, j.transport = transports[(o + p) % 2];
                j.own_data = p == 4;
                ENSURE(go(&j));
                if (j.hash[0] != serial.hash[0]) printf("    %s, optimizer %d: other bits\n", text, o);
                ENSURE(same_hashes(&j) && j.hash[0] == serial.hash[0]);
            }
    }
}

TEST(ps_has_the_bits_of_sync_by_central)
{
    for (int workers = 2; workers <= 5; workers++) {
        job sync = { .plan = "algorithm=central", .ranks = workers, .momentum = 0.9f, .epochs = 2 };
        ENSURE(go(&sync) && same_hashes(&sync));
        for (int i = 0; i < 4; i++) {
            static const char *const plans[] = { "strategy=ps,servers=1", "strategy=ps,servers=3",
                                                 "strategy=ssp,servers=2", "strategy=ps,servers=2" };
            const double slow[] = { 1, 3, 1, 2, 1, 1, 1, 1 };
            job          j = sync;
            j.plan = plans[i], j.ranks = workers + (i == 0 ? 1 : i == 1 ? 3 : 2), j.transport = transports[i % 2];
            j.step_s = 1, j.net.jitter = 0.5, j.net.slow = slow, j.step_by_step = i == 3 && workers == 2;
            if (j.step_by_step) continue;
            ENSURE(go(&j));
            if (j.hash[0] != sync.hash[0]) printf("    %s, %d workers: other bits\n", plans[i], workers);
            ENSURE(same_hashes(&j) && j.hash[0] == sync.hash[0]);
        }
    }
}

TEST(runs_in_virtual_time_repeat_bit_for_bit)
{
    static const char *const plans[] = { "strategy=ps,servers=2", "strategy=backup,backup=1,servers=2",
                                         "strategy=ssp,staleness=2,servers=2", "strategy=async,servers=2",
                                         "strategy=federated,servers=2,period=3,share=0.5,seed=4" };
    const double slow[] = { 1, 3, 1, 2, 1, 1 };
    for (int i = 0; i < 5; i++) {
        uint64_t hash[3];
        for (int k = 0; k < 3; k++) {
            job j = { .plan = plans[i], .ranks = 6, .transport = HPML_TRANSPORT_CLOCK, .step_s = 1, .epochs = 3 };
            j.net.jitter = 0.9, j.net.seed = k == 2 ? 8 : 3, j.net.slow = slow, j.net.inside.latency = 0.1;
            j.own_data = i == 4;
            ENSURE(go(&j) && same_hashes(&j));
            hash[k] = j.hash[0];
        }
        ENSURE(hash[0] == hash[1]);
        if (i == 2 || i == 3) ENSURE(hash[0] != hash[2]); /* another order of gradients */
    }
}

/* ---- how many bytes ---- */

TEST(a_server_gets_and_sends_its_range_of_each_workers_gradient)
{
    static const char *const plans[] = { "strategy=ps,servers=%d", "strategy=async,servers=%d" };
    const int64_t            total = 31 * (INPUTS + 1) + CLASSES * 32, header = 16, request = 56;
    for (int servers = 1; servers <= 4; servers++)
        for (int p = 0; p < 2; p++) {
            char text[80];
            snprintf(text, sizeof text, plans[p], servers);
            job j = { .plan = text, .ranks = 3 + servers, .samples = 180, .transport = HPML_TRANSPORT_CLOCK };
            j.step_by_step = p == 1; /* nothing is dealt */
            ENSURE(go(&j));
            for (int s = 0; s < servers; s++) {
                int64_t floats = total * (s + 1) / servers - total * s / servers;
                int64_t data = p == 0 ? j.sent[3 + s] % (10 * 3 * (4 * floats + header)) : 0; /* fit compares marks */
                ENSURE(j.sent[3 + s] - data == 10 * 3 * (4 * floats + header) && data < 200);
            }
            for (int k = 0; k < 3 && p == 1; k++) ENSURE(j.sent[k] == 10 * (4 * total + servers * request));
        }
}

/* One server of 8 workers is the bottleneck: it moves 2 K M bytes a step, a rank of a ring sends 2 (K - 1) / K M. */
TEST(a_server_moves_more_than_a_rank_of_a_ring)
{
    job ring = { .plan = "algorithm=ring", .ranks = 8, .transport = HPML_TRANSPORT_CLOCK, .digits = true };
    ring.batch = 8, ring.samples = 8 * 8 * 4, ring.net.ranks_per_node = 1, ring.net.between.bandwidth = 1e6;
    job one = ring, more[2];
    one.plan = "strategy=ps,servers=1", one.ranks = 9;
    more[0] = ring, more[1] = one;
    more[0].epochs = more[1].epochs = 2;
    ENSURE(go(&ring) && go(&one) && go(&more[0]) && go(&more[1]));
    const double bytes = 2 * (double)one.sent[8] / (double)ring.sent[0];
    const double later = (more[1].first_free - one.first_free) / (more[0].first_free - ring.first_free);
    printf("    %.2f times the bytes, %.2f times the time of a ring\n", bytes, later);
    ENSURE_NEAR(bytes, 64.0 / 7, 0.02 * 64 / 7);
    ENSURE_NEAR(later, 8 * 9 / 14.0, 0.02 * 8 * 9 / 14.0); /* K (K + 1) / (2 (K - 1)): a card sends while it receives */
}

/* Of 10 ranks, how many should be servers? The forecast's steps are those of the transport in virtual time. */
TEST(the_forecast_finds_the_best_number_of_servers)
{
    const int64_t total = 31 * (INPUTS + 1) + CLASSES * 32;
    const double  step_s = 1, shares[] = { 0.02, 0.5, 4 }; /* seconds for all floats on the link */
    int           found[3] = { 0 };
    for (int net = 0; net < 3; net++) {
        double best[2] = { 0 };
        int    at[2] = { 0 };
        for (int servers = 1; servers < 9; servers++) {
            char text[60];
            job  j = { .plan = text, .ranks = 10, .transport = HPML_TRANSPORT_CLOCK, .step_s = step_s };
            snprintf(text, sizeof text, "strategy=ps,servers=%d", servers);
            j.net.ranks_per_node = 1, j.net.between.bandwidth = 4 * (double)total / shares[net];
            j.samples = 6 * (10 - servers) * 8;
            job twice = j;
            twice.epochs = 2;
            ENSURE(go(&j) && go(&twice));
            const hpml_plan        plan = { .strategy = HPML_STRATEGY_PS, .servers = servers };
            const hpml_layer_facts all = { .forward_s = step_s / 16, .backward_s = step_s / 16, .cols = total };
            const hpml_model_facts facts = { .facts = { .ranks = 10, .batch = 8 }, .layers = 1, .layer = &all };
            const hpml_machine     machine = { .network = j.net };
            hpml_prediction        s;
            ENSURE(hpml_forecast(&plan, &facts, &machine, &s, NULL, 0) == HPML_OK);
            const double took = (twice.first_free - j.first_free) / 8;
            if (fabs(s.step_s / took - 1) > 0.03) printf("    %d: %.4f s, forecast %.4f s\n", servers, took, s.step_s);
            ENSURE_NEAR(s.step_s, took, 0.03 * took);
            const double rate[2] = { (10 - servers) / took, (10 - servers) / s.step_s };
            for (int i = 0; i < 2; i++)
                if (rate[i] > best[i]) best[i] = rate[i], at[i] = servers;
        }
        printf("    all floats in %.2f s: %d servers are best, forecast %d\n", shares[net], at[0], at[1]);
        ENSURE(at[0] == at[1]);
        found[net] = at[0];
    }
    ENSURE(found[0] < found[1] && found[1] < found[2]);
}

/* ---- how well, and how fast ---- */

static job learning(const char *plan, int ranks)
{
    job j = { .plan = plan, .ranks = ranks, .transport = HPML_TRANSPORT_CLOCK, .digits = true, .batch = 128, .lr = 0.2f,
              .epochs = 15, .step_s = 1 };
    return j;
}

/* Steps with gradients of older parameters: 3 workers more do no harm, 15 do. */
TEST_PLAIN(asynchronous_training_learns_if_the_delay_is_small)
{
    job four = learning("strategy=async,servers=1", 5), again = four;
    four.net.jitter = again.net.jitter = 0.3;
    ENSURE(go(&four) && go(&again));
    printf("    accuracy %.4f\n", four.accuracy);
    ENSURE(four.accuracy >= 0.955 && four.hash[0] == again.hash[0]);
    job many = learning("strategy=async,servers=1", 17);
    ENSURE(go(&many));
    printf("    accuracy %.4f with 16 workers\n", many.accuracy);
    ENSURE(many.accuracy < 0.5);
}

TEST_PLAIN(stale_synchronous_training_bounds_how_far_a_worker_is_ahead)
{
    static const char *const plans[] = { "strategy=ssp,staleness=3,servers=1", "strategy=ssp,staleness=3,servers=3",
                                         "strategy=ssp,staleness=100000,servers=1" };
    const double slow[] = { 1, 1, 1, 4, 1, 1, 1 };
    for (int i = 0; i < 3; i++) {
        job j = { .plan = plans[i], .ranks = 4 + (i == 1 ? 3 : 1), .transport = HPML_TRANSPORT_CLOCK, .step_s = 1 };
        j.samples = 500 * 24, j.net.slow = slow;
        ENSURE(go(&j) && j.steps[0] == 500);
        ENSURE(i < 2 ? j.lead == 3 : j.lead > 300);
    }
    job l = learning("strategy=ssp,staleness=3,servers=1", 5);
    l.net.slow = slow;
    ENSURE(go(&l));
    printf("    accuracy %.4f\n", l.accuracy);
    ENSURE(l.accuracy >= 0.955);
}

/* Each worker has two classes of the digits, and some are slower than others. With a bound all classes are learned at
   the same time; without one, fast workers have ended when slow ones train on, and what they taught is forgotten. */
TEST_LONG(unbounded_staleness_forgets_what_fast_workers_taught)
{
    static const char *const plans[] = { "strategy=ssp,staleness=2,servers=1",
                                         "strategy=ssp,staleness=1000000,servers=1" };
    const double slow[] = { 1, 2, 4, 8, 16, 1 };
    double       accuracy[2];
    for (int i = 0; i < 2; i++) {
        job j = learning(plans[i], 6);
        j.own_data = j.sorted = true, j.lr = 0.1f, j.batch = 64, j.epochs = 8, j.net.slow = slow;
        ENSURE(go(&j));
        accuracy[i] = j.accuracy;
    }
    printf("    accuracy %.4f, without a bound %.4f\n", accuracy[0], accuracy[1]);
    ENSURE(accuracy[0] >= 0.90 && accuracy[1] < 0.5);
}

TEST_PLAIN(replicas_learn_with_adagrad_on_the_server)
{
    job j = learning("strategy=async,servers=2", 6);
    j.opt = HPML_OPT_ADAGRAD, j.lr = 0.02f, j.net.jitter = 0.3;
    ENSURE(go(&j));
    printf("    accuracy %.4f\n", j.accuracy);
    ENSURE(j.accuracy >= 0.95);
}

/* One of 9 workers takes 10 times as long: 8 gradients are enough. */
TEST(backup_workers_make_up_for_a_slow_one)
{
    double slow[10];
    for (int r = 0; r < 10; r++) slow[r] = 1;
    double took[3];
    for (int i = 0; i < 3; i++) {
        slow[4] = i == 0 ? 1 : 10;
        job j = { .plan = i == 2 ? "strategy=ps,servers=1" : "strategy=backup,backup=1,servers=1", .ranks = 10 };
        j.transport = HPML_TRANSPORT_CLOCK, j.samples = 54 * 100, j.step_s = 1, j.net.slow = slow;
        ENSURE(go(&j) && j.steps[0] == 100);
        took[i] = j.first_free;
        if (i == 1) ENSURE(j.computed[4] >= 9 && j.computed[4] <= 11 && j.computed[0] == 100);
    }
    printf("    100 steps take %.1f s, with a worker 10 times as slow %.1f s, without a backup %.1f s\n", took[0],
           took[1], took[2]);
    ENSURE(took[1] <= 1.02 * took[0] && took[2] > 9 * took[0]);
}

/* One of 4 workers takes 10 times as long: it computes a tenth of the shards. */
TEST(batches_are_dealt_on_demand)
{
    const double slow[] = { 1, 1, 10, 1, 1, 1, 1 };
    for (int servers = 1; servers <= 2; servers++) {
        job j = { .plan = servers == 1 ? "strategy=async,servers=1" : "strategy=async,servers=2" };
        j.ranks = 4 + servers;
        j.transport = HPML_TRANSPORT_CLOCK, j.samples = 24 * 100, j.epochs = 3, j.step_s = 1, j.net.slow = slow;
        ENSURE(go(&j));
        const int    all = 100 * 4 * 3;
        const double ideal = all / 3.1;
        printf("    %.1f s, ideal %.1f s; %d shards of the slow worker\n", j.end, ideal, j.computed[2]);
        ENSURE(j.computed[0] + j.computed[1] + j.computed[2] + j.computed[3] == all && j.computed[2] < all / 25);
        ENSURE(j.end <= 1.05 * ideal && j.steps[4] == all);
    }
}

/* ---- federated ---- */

TEST_ACCURACY(federated_clients_learn_in_few_rounds)
{
    job few  = learning("strategy=federated,servers=1,period=250,share=0.5,seed=1", 11);
    few.own_data = true, few.batch = 16, few.lr = 0.1f, few.goal = 0.93, few.epochs = 60;
    job many = few, skewed = few;
    many.plan = "strategy=federated,servers=1,period=1,share=0.5,seed=1", many.batch = 800, many.lr = 0.5f;
    skewed.plan = "strategy=federated,servers=2,period=50,share=0.5,seed=1", skewed.ranks = 12, skewed.sorted = true;
    skewed.lr = 0.2f, skewed.goal = 0.90;
    ENSURE(go(&few));
    printf("    93 %% after %d rounds of 5 epochs\n", few.rounds);
    many.epochs = 10 * few.rounds;
    ENSURE(go(&many));
    printf("    %.2f %% after %d rounds of a gradient\n", 100 * many.accuracy, many.rounds);
    ENSURE(few.accuracy >= 0.93 && many.rounds == many.epochs && many.accuracy < 0.93);
    ENSURE(go(&skewed));
    printf("    two classes a client: 90 %% after %d rounds, %.2f %%\n", skewed.rounds, 100 * skewed.accuracy);
    ENSURE(skewed.rounds < 60 && skewed.accuracy >= 0.90);
}

/* ---- ranks that are lost ---- */

/* Workers leave or fail in the middle, or before the first step, or all but one: the others end the training. */
TEST(a_training_goes_on_without_workers_that_are_lost)
{
    static const char *const plans[] = { "strategy=ps,servers=%d", "strategy=backup,backup=1,servers=%d",
                                         "strategy=ssp,staleness=2,servers=%d", "strategy=async,servers=%d",
                                         "strategy=federated,servers=%d,period=3,share=0.5,seed=2" };
    for (int p = 0; p < 5; p++)
        for (int i = 0; i < 8; i++) {
            char text[80];
            job  j = { .plan = text, .ranks = 5 + i % 2, .transport = transports[i / 4], .survive = true, .epochs = 3 };
            snprintf(text, sizeof text, plans[p], 1 + i % 2);
            j.fails = i / 2 % 2 == 1, j.step_s = 1, j.own_data = p == 4;
            j.lost[0] = 3, j.lost_step[0] = 10;
            if (i >= 6) j.lost[1] = 1, j.lost_step[1] = 1, j.lost[2] = 4, j.lost_step[2] = 10;
            ENSURE(go(&j));
            if (j.hash[4] != j.hash[1]) printf("    %s, case %d\n", text, i);
            ENSURE(j.hash[1] != 0 && j.hash[4] == j.hash[1]);
            ENSURE(j.hash[2] == 0 || (p == 3 && j.steps[2] < 10)); /* a rank may get too few batches */
            if (p == 3) { /* each shard was computed once, but for one that a rank has lost */
                int computed = 0;
                for (int k = 0; k < 4; k++) computed += j.computed[k];
                ENSURE(computed == 3 * ((200 + 5) / 6));
            }
        }
}

/* Neighbours of a lost rank take its weight themselves; the mean at the end is that of the ranks that are there. A
   checkpoint that is saved then loads on other numbers of ranks. */
TEST(gossip_and_checkpoints_go_on_without_lost_ranks)
{
    static const char *const plans[] = { "strategy=gossip", "strategy=gossip,topology=wheel",
                                         "strategy=gossip,topology=pairs", "strategy=gossip,topology=all",
                                         "strategy=ps,servers=2", "strategy=async,servers=1",
                                         "strategy=federated,servers=1,period=2" };
    for (int p = 0; p < 7; p++)
        for (int i = 0; i < 4; i++) {
            const int servers = p < 4 ? 0 : p == 4 ? 2 : 1;
            job j = { .plan = plans[p], .ranks = 6 + servers, .transport = transports[i / 2], .survive = true };
            j.epochs = 4, j.samples = 240, j.step_s = 1, j.own_data = p == 6, j.fails = i % 2;
            j.opt = p < 4 ? HPML_OPT_ADAM : HPML_OPT_SGD, j.lr = p < 4 ? 0.01f : 0.1f;
            j.lost[0] = 3, j.lost_step[0] = 5;
            j.lost[1] = i == 3 ? 1 : 5, j.lost_step[1] = 11; /* the first rank, whose hub the wheel has */
            j.save = "build/lost.safetensors";
            ENSURE(go(&j));
            for (int r = 0; r < 6; r++) {
                const bool lost = r == j.lost[0] - 1 || r == j.lost[1] - 1;
                if (p == 5 && lost) continue; /* may have got too few batches to be lost */
                if ((j.hash[r] == 0) != lost || (!lost && j.hash[r] != j.hash[1]))
                    printf("    %s, case %d, rank %d\n", plans[p], i, r);
                ENSURE((j.hash[r] == 0) == lost && (lost || j.hash[r] == j.hash[1]));
            }
            job more = { .plan = plans[p], .ranks = 3 + servers, .load = j.save, .own_data = p == 6 };
            more.opt = j.opt, more.lr = j.lr, more.transport = j.transport;
            ENSURE(go(&more) && more.loss > 0 && (i == 3 || more.loss < 1.05 * j.loss));
        }
    remove("build/lost.safetensors");
}

/* A fit that .max_steps ends, without hpml_distribute_finish: no rank waits for ever. */
TEST(a_training_may_end_without_finish)
{
    static const char *const plans[] = { "strategy=async,servers=1", "strategy=async,servers=2",
                                         "strategy=ps,servers=1", "strategy=ssp,staleness=2,servers=1" };
    for (int p = 0; p < 4; p++)
        for (int i = 0; i < 4; i++) {
            job j = { .plan = plans[p], .ranks = 5, .transport = transports[i / 2], .survive = i % 2, .epochs = 3 };
            j.max_steps = 7, j.no_finish = true, j.step_s = 1;
            ENSURE(go(&j) && j.computed[0] + j.computed[1] + j.computed[2] > 0);
            for (int r = 0; r < 3; r++) ENSURE(j.steps[r] == 7); /* of a worker, whatever those of the servers */
        }
}

TEST(a_lost_server_is_an_error_that_names_it)
{
    static const char *const plans[] = { "strategy=ps,servers=2", "strategy=async,servers=2",
                                         "strategy=federated,servers=2,period=2" };
    for (int p = 0; p < 3; p++)
        for (int t = 0; t < 2; t++) {
            job j = { .plan = plans[p], .ranks = 5, .transport = transports[t], .survive = true, .epochs = 3 };
            j.lost[0] = 5, j.lost_step[0] = 5, j.own_data = p == 2, j.quiet = j.fails = true;
            ENSURE(!go(&j));
            if (!strstr(j.why, "server 1 of 2 (rank 4)")) printf("    %s\n", j.why);
            ENSURE(strstr(j.why, "server 1 of 2 (rank 4) has failed or left") && strstr(j.error, "on purpose"));
        }
}

/* A worker has failed before a server begins to receive requests: the server fails, too. */
static hpml_status serves_late(hpml_comm *c, void *user)
{
    bool         *has_failed = (bool *)user; /* atomic */
    const job     j = { .batch = 6, .lr = 0.1f };
    hpml_plan     plan = { .strategy = HPML_STRATEGY_PS, .servers = 1 };
    float         x[6 * INPUTS] = { 0 };
    int32_t       y[6] = { 0 };
    hpml_trainer *t = trainer_of(&j, hpml_comm_ctx(c));
    hpml_distribute(t, c, &plan);
    if (hpml_comm_rank(c) == 0) {
        hpml_ctx_fail(hpml_comm_ctx(c), HPML_ERR_STATE, "on purpose");
        hpml_barrier(c); /* tells the other ranks */
        __atomic_store_n(has_failed, true, __ATOMIC_RELEASE);
    }
    while (!__atomic_load_n(has_failed, __ATOMIC_ACQUIRE)) usleep(100);
    return hpml_trainer_step(t, x, y, 6, NULL);
}

TEST(a_worker_that_fails_early_is_named)
{
    bool             has_failed = false;
    char             text[512];
    hpml_launch_desc l = { .ranks = 3, .timeout = 30, .alone = true, .ctx.threads = 1 };
    ENSURE(hpml_launch(&l, serves_late, &has_failed, text, sizeof text) != HPML_OK && strstr(text, "on purpose"));
}

/* Workers leave or fail at random steps: the loss stays near that of undisturbed runs, each a median of five. */
static double median(double *x)
{
    for (int i = 0; i < 5; i++)
        for (int k = i + 1; k < 5; k++)
            if (x[k] < x[i]) {
                const double swap = x[i];
                x[i] = x[k];
                x[k] = swap;
            }
    return x[2];
}

TEST_LONG(storms_of_lost_workers_leave_the_loss_as_it_is)
{
    static const char *const plans[] = { "strategy=ps,servers=1", "strategy=async,servers=2",
                                         "strategy=federated,servers=1,period=5,share=0.5,seed=3" };
    const char *storms = getenv("HPML_STORMS"), *seed = getenv("HPML_STORM_SEED");
    hpml_rng    rng    = { .seed = seed ? (uint64_t)atoi(seed) : 7 };
    int         lost   = 0;
    for (int p = 0; p < 3; p++)
        for (int times = storms ? (atoi(storms) + 14) / 15 : 1; times > 0; times--) {
            double loss[2][5];
            for (int i = 0; i < 5; i++)
                for (int calm = 0; calm < 2; calm++) {
                    job j = { .plan = plans[p], .ranks = p == 1 ? 8 : 7, .transport = HPML_TRANSPORT_CLOCK };
                    j.survive = true, j.step_s = 1, j.net.jitter = 0.5, j.net.seed = (uint64_t)i + 1;
                    j.own_data = p == 2, j.samples = 480, j.epochs = p == 1 ? 5 : 20, j.lr = p == 1 ? 0.05f : 0.2f;
                    j.lost[0]      = calm ? 0 : 2 + (int)hpml_rng_below(&rng, 5);
                    j.lost_step[0] = 1 + (int)hpml_rng_below(&rng, p == 1 ? 50 : 200);
                    j.fails        = hpml_rng_below(&rng, 2) > 0;
                    ENSURE(go(&j));
                    loss[calm][i] = j.loss;
                    for (int k = 0; k < 6; k++) lost += j.hash[k] == 0;
                }
            const double stormy = median(loss[0]), quiet = median(loss[1]);
            printf("    %s: loss %.4f, undisturbed %.4f\n", plans[p], stormy, quiet);
            ENSURE(stormy <= 1.05 * quiet);
        }
    printf("    %d workers were lost\n", lost);
    ENSURE(lost >= (storms ? atoi(storms) * 4 / 5 : 12));
}

/* ---- codecs, checkpoints, threads ---- */

/* What workers pushed and what they keep is all of their gradients; few bits a number train as well as all. */
TEST_ACCURACY(gradients_go_up_in_few_bits)
{
    static const struct { const char *plan; double least, share; } rows[] = {
        { "strategy=ps,servers=2,codec=bf16", 0.955, 0.51 },
        { "strategy=ps,servers=3,codec=onebit", 0.95, 0.06 },
        { "strategy=ps,servers=1,codec=twobit,codec.threshold=0.05", 0.955, 0.08 },
        { "strategy=async,servers=2,codec=onebit", 0.92, 0.06 } };
    for (int i = 0; i < 4; i++) {
        job j = learning(rows[i].plan, 6);
        j.lr = 0.05f, j.momentum = i < 3 ? 0.9f : 0.5f;
        j.batch = i < 3 ? 32 : 128;
        ENSURE(go(&j));
        const double up = (double)j.sent[0] / (4.0 * 101770 * j.computed[0]);
        printf("    %s: accuracy %.4f, %.1f %% of the bytes\n", rows[i].plan, j.accuracy, 100 * up);
        ENSURE(j.accuracy >= rows[i].least && up < rows[i].share);
    }
}

/* A threshold far above the gradients: they wait in the residual until they are old. */
TEST_ACCURACY(a_threshold_of_two_bits_far_above_the_gradients_is_a_trap)
{
    static const char *const plans[] = { "strategy=ps,servers=1",
                                         "strategy=ps,servers=1,codec=twobit,codec.threshold=0.05",
                                         "strategy=ps,servers=1,codec=twobit,codec.threshold=0.5" };
    double loss[3];
    for (int i = 0; i < 3; i++) {
        job j = learning(plans[i], 5);
        j.lr = 0.05f, j.momentum = 0.9f, j.batch = 32, j.epochs = 8;
        ENSURE(go(&j));
        loss[i] = j.loss;
    }
    printf("    loss %.3f, with 2 bits and threshold 0.05 %.3f, 0.5 %.3f\n", loss[0], loss[1], loss[2]);
    ENSURE(loss[2] > 1.3 * loss[1] && loss[2] > 1.6 * loss[0]);
}

/* Each worker pushes gradients that do not depend on the parameters, and pulls: the parameters are minus their sum.
   With a codec, that sum and the residuals together are the sum of what was pushed. */
typedef struct pushing { const char *plan; double apart; } pushing;

enum { PUSHED = 5, WIDE = 33 };

static hpml_status push_and_pull(hpml_comm *c, void *user)
{
    pushing      *p = (pushing *)user;
    hpml_ctx     *ctx = hpml_comm_ctx(c);
    const int     rank = hpml_comm_rank(c);
    hpml_tensor  *x = hpml_input_2d(ctx, 1, WIDE), *y = hpml_linear(x, 1, &(hpml_linear_desc){ .no_bias = true });
    hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = x, .output = y, .target = x, .loss_tensor = hpml_sum(y, HPML_ALL_DIMS), .lr = 1 });
    hpml_plan     plan = { 0 };
    float        *w = hpml_param_at(ctx, 0)->data, g[WIDE];
    double        sum[WIDE] = { 0 };
    hpml_safetensor residual = { 0 };
    hpml_plan_parse(p->plan, &plan, NULL, 0);
    const int         workers = hpml_comm_size(c) - plan.servers;
    memset(w, 0, WIDE * sizeof *w);
    hpml_distributed *d = hpml_distribute(t, c, &plan);
    for (int step = 0; step < PUSHED; step++)
        for (int r = 0; r < workers; r++) {
            hpml_rng rng = { .seed = 1, .stream = (uint64_t)(step * workers + r) };
            hpml_rng_fill_normal(&rng, g, WIDE);
            for (int i = 0; i < WIDE; i++) sum[i] += g[i];
            if (r == rank) hpml_trainer_step(t, g, g, 1, NULL);
            if (r == 0 && rank >= workers) hpml_trainer_step(t, g, g, 0, NULL);
        }
    hpml_distribute_save(d, "build/pushed.safetensors");
    hpml_safetensors *f = hpml_safetensors_open(ctx, "build/pushed.safetensors");
    if (f && plan.codec.kind) hpml_safetensors_find(f, "state.residual.ranks.servers", &residual);
    for (int i = 0; i < WIDE && f; i++) {
        float kept = 0;
        sum[i] += w[i];
        for (int r = 0; r < workers && residual.data; r++) {
            memcpy(&kept, (const char *)residual.data + sizeof kept * (size_t)(r * WIDE + i), sizeof kept);
            sum[i] -= kept;
        }
        if (rank == 0) p->apart = fmax(p->apart, fabs(sum[i]));
    }
    hpml_safetensors_close(f);
    return hpml_ctx_status(ctx);
}

TEST(pushes_and_a_pull_are_their_sum)
{
    static const char *const plans[] = { "strategy=ps,servers=1,sum=1", "strategy=ps,servers=3,sum=1",
                                         "strategy=async,servers=2", "strategy=ps,servers=2,sum=1,codec=twobit",
                                         "strategy=async,servers=1,codec=twobit,codec.threshold=0.7",
                                         "strategy=ps,servers=1,sum=1,codec=onebit" };
    for (int i = 0; i < 6; i++) {
        pushing          p = { plans[i], 0 };
        char             error[300] = "";
        hpml_launch_desc l = { .ranks = 7, .ctx.threads = 1, .transport = transports[i % 2], .timeout = 20 };
        hpml_status      status = hpml_launch(&l, push_and_pull, &p, error, sizeof error);
        if (status != HPML_OK || !(p.apart < 3e-6)) printf("    %s: %s, %g\n", plans[i], error, p.apart);
        ENSURE(status == HPML_OK && p.apart < 3e-6);
    }
    remove("build/pushed.safetensors");
}

/* A checkpoint has what the servers keep: the same steps follow, on as many ranks, with more or fewer servers. */
TEST(a_training_resumes_with_other_numbers_of_ranks)
{
    static const char *const plans[] = { "strategy=ps,servers=%d", "strategy=async,servers=%d",
                                         "strategy=federated,servers=%d,period=5" };
    for (int p = 0; p < 3; p++) {
        char text[3][80];
        for (int i = 0; i < 3; i++) snprintf(text[i], sizeof text[i], plans[p], 1 + i);
        job first = { .plan = text[0], .ranks = 5, .opt = p == 2 ? HPML_OPT_SGD : HPML_OPT_ADAM, .lr = 0.01f };
        first.transport = HPML_TRANSPORT_CLOCK, first.samples = 240, first.step_s = 1;
        job whole = first;
        first.save = "build/servers.safetensors";
        ENSURE(go(&first));
        whole.twice = true;
        ENSURE(go(&whole));
        for (int i = 0; i < 3; i++) { /* as many workers, other servers; then fewer workers, then more */
            job j = first;
            j.save = NULL, j.load = first.save, j.plan = text[i], j.ranks = 4 + 1 + i;
            ENSURE(go(&j) && j.hash[0] == whole.hash[0]);
        }
        for (int ranks = 3; ranks < 9; ranks += 5) {
            job j = first;
            j.save = NULL, j.load = first.save, j.ranks = ranks;
            ENSURE(go(&j) && j.loss < 1.02 * first.loss);
        }
        remove("build/servers.safetensors");
    }
}

#ifdef __linux__
static int threads_now(void)
{
    char  line[256];
    int   n = 0;
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "Threads: %d", &n) == 1) break;
    if (f) fclose(f);
    return n;
}

static int count_threads(const hpml_step_info *info, void *user)
{
    const int n = threads_now();
    int      *most = (int *)user;
    if (info->step > 1 && n > *most) *most = n;
    return 0;
}

static hpml_status twenty(hpml_comm *c, void *user)
{
    job               j = { .batch = 6, .lr = 0.1f, .samples = 600 };
    hpml_trainer     *t = trainer_of(&j, hpml_comm_ctx(c));
    hpml_plan         plan = { .strategy = HPML_STRATEGY_PS, .servers = 4 };
    hpml_loader_desc  of = { .no_prefetch = true };
    hpml_distributed *d = hpml_distribute(t, c, &plan);
    hpml_fit_desc     fit = { .epochs = 3, .loader = &of, .user = user };
    fit.on_step = hpml_comm_rank(c) ? NULL : count_threads;
    hpml_status       status = hpml_trainer_fit(t, points(hpml_comm_ctx(c), 600, 0, 0, 0), &fit);
    if (status == HPML_OK) status = hpml_distribute_finish(d);
    return status != HPML_OK || same_params(c) || hpml_comm_rank(c) > 0 ? status : HPML_ERR_STATE;
}

TEST_PLAIN(sixteen_workers_and_four_servers_are_twenty_threads)
{
    const int        before = threads_now();
    int              most = 0;
    hpml_launch_desc l = { .ranks = 20, .ctx.threads = 1, .timeout = 30 };
    ENSURE(hpml_launch(&l, twenty, &most, NULL, 0) == HPML_OK);
    if (most > before + 20) printf("    %d threads, %d before\n", most, before);
    ENSURE(most > 0 && most <= before + 20);
}
#endif
#endif /* HPML_USE_MPI */
