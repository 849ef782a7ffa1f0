/* Exercise 13: checks a synchronous parameter server: its weights, its messages, and the order in which it adds. */
#include "../ranks.h"

/* Rank 0, the server. In each round: sends w, n floats, to each worker, receives a gradient of each worker, and adds
   the gradients with server_add in the order in which they arrive; then w -= lr * (their sum) / (number of workers).
   room: memory for p arrays of n floats, for example one for the sum and one for each worker. */
hpml_status serve(hpml_comm *c, float *w, int64_t n, int rounds, float lr, float *room);
/* Ranks 1 to p - 1, the workers. In each round: receives w, computes the gradient g of that round with server_gradient,
   and sends g to rank 0. */
hpml_status work(hpml_comm *c, float *w, float *g, int64_t n, int rounds);

enum { SERVER_ROUNDS = 12, SERVER_ADD_US = 1000 };

typedef struct server_run {
    int     p, rounds;
    int64_t n;
    float   lr, *w[RANKS_MAX], *g[RANKS_MAX], *room;
    double *right[SERVER_ROUNDS + 1];            /* (n) the weights before each round, and in the end */
    double  seconds[RANKS_MAX][SERVER_ROUNDS];   /* that a worker computes */
    char    what[96];
} server_run;
static server_run server;

static double server_target(int worker, int round, int64_t i) { return (worker * 7 + round * 5 + i * 3) % 23 - 11; }

static bool server_is_near(double x, double right) { return fabs(x - right) <= 1e-4 * (1 + fabs(right)); }

/* Computes worker's gradient of round `round` (from 0) at the weights w; takes virtual time. */
static __attribute__((unused)) void server_gradient(hpml_comm *c, int round, const float *w, float *g, int64_t n)
{
    const int worker = hpml_comm_rank(c);
    for (int64_t i = 0; i < n; i++) {
        if (!server_is_near(w[i], server.right[round][i]))
            grade_fail("%s: in round %d worker %d computes with weight %lld = %g, and it is %g at the start of that "
                       "round: the server updates w once a round, when the gradients of all workers have come, and "
                       "sends it then", server.what, round, worker, (long long)i, w[i], server.right[round][i]);
        g[i] = (float)(w[i] - server_target(worker, round, i));
    }
    hpml_comm_compute(c, server.seconds[worker][round]);
}

/* sum += g, n floats; takes a millisecond of virtual time, however large they are. */
static __attribute__((unused)) void server_add(hpml_comm *c, float *sum, const float *g, int64_t n)
{
    for (int64_t i = 0; i < n; i++) sum[i] += g[i];
    hpml_comm_compute(c, 1e-6 * SERVER_ADD_US);
}

static hpml_status server_rank(hpml_comm *c, void *user)
{
    const int r = hpml_comm_rank(c);
    (void)user;
    if (r == 0) return serve(c, server.w[0], server.n, server.rounds, server.lr, server.room);
    return work(c, server.w[r], server.g[r], server.n, server.rounds);
}

static void server_fill(int p, int64_t n, int rounds)
{
    server = (server_run){ .p = p, .n = n, .rounds = rounds, .lr = 0.25f * (float)grade_int(1, 3) };
    snprintf(server.what, sizeof server.what, "%d workers, %lld floats, %d rounds, lr %g", p - 1, (long long)n, rounds,
             server.lr);
    server.room = grade_floats("room", p * n);
    for (int r = 0; r < p; r++) server.w[r] = grade_floats("w", n);
    for (int r = 1; r < p; r++) server.g[r] = grade_floats("g", n);
    for (int r = 1; r < p; r++)
        for (int k = 0; k < rounds; k++) server.seconds[r][k] = grade_real(0.010, 0.020);
    for (int k = 0; k <= rounds; k++)
        server.right[k] = (double *)grade_memory("the checker's weights", (size_t)n * sizeof(double));
    for (int64_t i = 0; i < n; i++) server.right[0][i] = server.w[0][i] = (float)grade_int(-9, 9);
    for (int k = 0; k < rounds; k++)
        for (int64_t i = 0; i < n; i++) {
            double sum = 0;
            for (int r = 1; r < p; r++) sum += server.right[k][i] - server_target(r, k, i);
            server.right[k + 1][i] = server.right[k][i] - server.lr * sum / (p - 1);
        }
}

static bool server_go(const hpml_launch_desc *launch, int64_t n, int rounds)
{
    server_fill(launch->ranks, n, rounds);
    if (!ranks_run(server.what, launch, server_rank, NULL) || grade_text[0]) return false;
    for (int64_t i = 0; i < n; i++)
        if (!server_is_near(server.w[0][i], server.right[rounds][i]))
            return grade_fail("%s: in the end weight %lld is %g, expected %g: in each round w -= lr * (sum of the "
                              "gradients of all workers, each once) / (number of workers)", server.what, (long long)i,
                              server.w[0][i], server.right[rounds][i]);
    return true;
}

static bool one_round(void)
{
    for (int p = 2; p <= 7; p++) {
        const hpml_launch_desc launch = ranks_clock(p, 1e-5, 1e9);
        if (!server_go(&launch, grade_int(1, 40), 1)) return false;
    }
    return true;
}

static bool many_rounds(void)
{
    for (int p = 2; p <= 7; p++) {
        const hpml_launch_desc launch = ranks_clock(p, 1e-5, 1e9);
        if (!server_go(&launch, grade_int(1, 40), grade_int(2, SERVER_ROUNDS))) return false;
    }
    return true;
}

static bool as_threads(void)
{
    for (int p = 2; p <= 4; p++) {
        const hpml_launch_desc launch = ranks_threads(p);
        if (!server_go(&launch, 1000, 3)) return false;
    }
    return true;
}

static bool traffic(void)
{
    const hpml_launch_desc launch = ranks_clock(6, 1e-5, 1e9);
    if (!server_go(&launch, 50, 4)) return false;
    for (int r = 1; r < 6; r++) {
        if (rank_reports[r].count.messages != 4 || rank_reports[r].bytes_to[0] != 4 * 200)
            return grade_fail("%s: worker %d has sent %lld messages, %lld bytes to the server; one gradient of 200 "
                              "bytes in each round is 4 messages, 800 bytes", server.what, r,
                              (long long)rank_reports[r].count.messages, (long long)rank_reports[r].bytes_to[0]);
        if (rank_reports[0].messages_to[r] != 4 || rank_reports[0].bytes_to[r] != 4 * 200)
            return grade_fail("%s: the server has sent %lld messages, %lld bytes to worker %d; the weights once in "
                              "each round are 4 messages, 800 bytes", server.what,
                              (long long)rank_reports[0].messages_to[r],
                              (long long)rank_reports[0].bytes_to[r], r);
    }
    return true;
}

static int server_compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* Worker 1 is the slowest: a server that waits for it first adds all the others after it. */
static bool order_of_arrival(void)
{
    for (int p = 3; p <= 8; p++) {
        const hpml_launch_desc launch = ranks_clock(p, 1e-6, 0);
        double                 right  = 0, arrival[RANKS_MAX];
        server_fill(p, 8, 5);
        for (int k = 0; k < 5; k++) {
            double time = 0;
            server.seconds[1][k] = 0.040;
            for (int r = 1; r < p; r++) arrival[r] = server.seconds[r][k];
            qsort(arrival + 1, (size_t)(p - 1), sizeof *arrival, server_compare);
            for (int r = 1; r < p; r++) time = fmax(time, arrival[r]) + 1e-6 * SERVER_ADD_US;
            right += time;
        }
        if (!ranks_run(server.what, &launch, server_rank, NULL) || grade_text[0]) return false;
        if (ranks_end(p) > 1.01 * right)
            return grade_fail("%s, of which worker 1 takes 40 ms and the others 10 to 20: %.1f ms of virtual time, and "
                              "%.1f are enough: add each gradient when it arrives (hpml_wait_any), not in the order of "
                              "ranks or when all have come", server.what, 1e3 * ranks_end(p), 1e3 * right);
    }
    return true;
}

static const grade_case cases[] = {
    { "one round", 25, one_round },
    { "many rounds", 25, many_rounds },
    { "sends that wait for their receives", 10, as_threads },
    { "messages and bytes", 15, traffic },
    { "adds gradients in the order of arrival", 25, order_of_arrival },
};
int main(int argc, char **argv) { return GRADE("13 synchronous parameter server", cases); }
