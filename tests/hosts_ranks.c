/* The ranks of test_hosts.sh: some training steps of a model that is large for the network between two hosts.
       hosts_ranks threads|mpi none|onebit|exact steps timeout [bandwidth compute update pack]
   Rank 0 prints, in seconds, the medians of a step, of its computation, of the update and of the exchange; the step
   that hpml_simulate predicts from the four numbers given (bandwidth in bytes a second); bytes sent; the first and the
   last loss. Without those numbers nothing overlaps, so that each part is measured alone. Every rank prints the hash of
   its weights, or its error. */
#include "../hpml_comm.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* In MPI_Finalize MPICH 4.0 over TCP closes its connections, then waits without serving them; a host that still has
   something to flush hangs, in one run of five (mended in MPICH by pull request 6596). This takes the place of UCX's
   own function: a rank that calls it has exchanged final control messages (see hpmlc_mpi_close), so nothing is left
   to flush. */
void *ucp_disconnect_nb(void *endpoint);
void *ucp_disconnect_nb(void *endpoint) { return (void)endpoint, NULL; }

enum { LAYERS = 3, BATCH = 64, RANKS = 2, MOST = 1000 };
static const int64_t width[LAYERS + 1] = { 784, 1024, 1024, 10 };

typedef struct job {
    const char *transport, *codec;
    int         steps;
    double      timeout;
    bool        predict;
    double      bandwidth, compute, update, pack; /* given */
} job;

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Without the first two: connections are made, pages are touched. */
static double median(double *x, int n)
{
    int skip = n > 4 ? 2 : 0;
    qsort(x + skip, (size_t)(n - skip), sizeof *x, ascending);
    return x[skip + (n - skip) / 2];
}

static double predict(const job *j, const hpml_codec_desc *codec)
{
    double          forward[LAYERS], backward[LAYERS], work = 0;
    int64_t         elements[LAYERS], packed[LAYERS], all = 0;
    hpml_simulation s;
    char            error[256];
    for (int i = 0; i < LAYERS; i++) {
        hpml_packing weight, bias;
        int64_t      n = width[i] * width[i + 1];
        hpml_packing_init(&weight, codec, width[i + 1], width[i]);
        hpml_packing_init(&bias, codec, 1, width[i + 1]);
        elements[i] = n + width[i + 1], packed[i] = (int64_t)(weight.size + bias.size);
        /* the first needs no gradient of its input */
        forward[i] = (double)n, backward[i] = (double)(i > 0 ? 2 * n : n);
        work += forward[i] + backward[i], all += elements[i];
    }
    for (int i = 0; i < LAYERS; i++) forward[i] *= j->compute / work, backward[i] *= j->compute / work;
    hpml_simulate_desc d = { .ranks = RANKS, .network = { .ranks_per_node = 1, .between = { 100e-6, j->bandwidth } },
                             .layers = LAYERS, .forward_s = forward, .backward_s = backward, .update_s = j->update,
                             .elements = elements, .bucket_bytes = 1 << 20 };
    if (codec->kind) d.packed = packed, d.codec_s_per_byte = j->pack / (double)(4 * all);
    if (hpml_simulate(&d, &s, error, sizeof error) == HPML_OK) return s.step_s;
    printf("simulate: %s\n", error);
    return -1;
}

/* Ten patterns under noise; the same for all, and each rank takes its share. */
static void draw(float *x, int32_t *y, int64_t step, int64_t first, int64_t samples)
{
    for (int64_t i = 0; i < samples; i++, x += width[0]) {
        hpml_rng noise = { 1, 1000 + (uint64_t)(step * BATCH + first + i), 0 };
        y[i] = (int32_t)hpml_rng_below(&noise, 10);
        hpml_rng pattern = { 1, (uint64_t)y[i], 0 };
        for (int64_t k = 0; k < width[0]; k++)
            x[k] = hpml_rng_uniform(&pattern) * 0.5f + hpml_rng_uniform(&noise) - 0.75f;
    }
}

static hpml_status train(hpml_comm *comm, void *user)
{
    const job       *j     = (const job *)user;
    hpml_ctx        *ctx   = hpml_comm_ctx(comm);
    int              rank  = hpml_comm_rank(comm);
    int64_t          share = BATCH / RANKS;
    hpml_linear_desc relu  = { .activation = HPML_ACT_RELU };
    hpml_codec_desc  codec = { .kind = strcmp(j->codec, "onebit") == 0 ? HPML_CODEC_ONEBIT : HPML_CODEC_NONE };
    bool             exact = strcmp(j->codec, "exact") == 0;
    double           step[MOST], compute[MOST], update[MOST], exchange[MOST], bytes = 0, first = 0, began = 0;
    hpml_tensor     *in = hpml_input_2d(ctx, share, width[0]);
    hpml_tensor     *out = hpml_linear(hpml_linear(hpml_linear(in, width[1], &relu), width[2], &relu), width[3], NULL);
    hpml_trainer    *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = in, .output = out, .lr = 0.02f, .momentum = 0.5f });
    hpml_distributed *d = hpml_distribute(t, comm, &(hpml_plan){
        .global_batch = BATCH, .codec = codec, .exact = exact, .no_overlap = !j->predict });
    hpml_distribute_report r = { 0 };
    float                 *x = (float *)calloc((size_t)(share * width[0]), sizeof *x);
    int32_t                y[BATCH];
    hpml_status            status = x && d ? HPML_OK : hpml_ctx_status(ctx);
    for (int s = 0; s < j->steps && status == HPML_OK; s++) {
        draw(x, y, s, rank * share, share);
        if ((status = hpml_barrier(comm)) != HPML_OK) break;
        hpml_distribute_get(d, NULL, true);
        began  = hpml_now();
        status = hpml_trainer_step(t, x, y, share, NULL);
        step[s] = hpml_now() - began;
        hpml_distribute_get(d, &r, false);
        compute[s] = r.compute_s, exchange[s] = r.comm_s, bytes = r.bytes;
        update[s] = step[s] - r.compute_s - r.exposed_s;
        if (s == 0) first = r.loss;
        if (rank == 0 && s == 2) printf("under way\n"), fflush(stdout);
    }
    if (status != HPML_OK) printf("rank %d ended after %.2f s in %s\n", rank, hpml_now() - began, hpml_ctx_error(ctx));
    else printf("rank %d hash %016llx\n", rank, (unsigned long long)hpml_param_hash(ctx));
    if (status == HPML_OK && rank == 0)
        printf("result step %.6f compute %.6f update %.6f exchange %.6f predicted %.6f bytes %.0f loss %.4f to %.4f\n",
               median(step, j->steps), median(compute, j->steps), median(update, j->steps), median(exchange, j->steps),
               j->predict ? predict(j, &codec) : 0, bytes, first, r.loss);
    fflush(stdout);
    free(x);
    return status;
}

int main(int argc, char **argv)
{
    char error[768];
    if (argc != 5 && argc != 9) return fprintf(stderr, "see hosts_ranks.c\n"), 2;
    job              j = { argv[1], argv[2], atoi(argv[3]), atof(argv[4]), argc == 9, 0, 0, 0, 0 };
    hpml_launch_desc l = { .ranks = RANKS, .timeout = j.timeout, .ctx = { .seed = 1, .threads = 1 } };
    if (j.steps < 1 || j.steps > MOST) return fprintf(stderr, "1 to %d steps\n", MOST), 2;
    if (j.predict)
        j.bandwidth = atof(argv[5]), j.compute = atof(argv[6]), j.update = atof(argv[7]), j.pack = atof(argv[8]);
    if (strcmp(j.transport, "mpi") == 0) l.transport = HPML_TRANSPORT_MPI, l.network.ranks_per_node = 1;
    if (hpml_launch(&l, train, &j, error, sizeof error) == HPML_OK) return 0;
    fprintf(stderr, "%s\n", error);
    return 1;
}
