/* Exercise 07: checks an allreduce in two levels, for ranks that share nodes. */
#include "../ranks.h"

/* The communicators that an allreduce in two levels needs, made once and used often. */
typedef struct hierarchy {
    hpml_comm *node;    /* the ranks of this rank's node; rank 0 of it is the node's leader */
    hpml_comm *leaders; /* the leaders of all nodes; NULL: this rank is none */
} hierarchy;
hpml_status hierarchy_open(hpml_comm *c, hierarchy *h);

/* Adds up x, n floats, over all ranks. Collectives of h->node and h->leaders are allowed. Between nodes goes what a
   ring of the leaders sends, and nothing else. */
hpml_status hierarchy_allreduce(const hierarchy *h, float *x, int64_t n);

typedef struct nodes_run {
    int     p, nodes;
    int32_t node[RANKS_MAX]; /* of each rank */
    bool    opens_only, whole_numbers;
    int64_t n;
    float  *x[RANKS_MAX];
    int     node_size[RANKS_MAX], leaders[RANKS_MAX]; /* as hierarchy_open has made them; leaders 0: NULL */
    char    what[128];
} nodes_run;
static nodes_run nodes;

static hpml_status nodes_rank(hpml_comm *c, void *user)
{
    const int   r = hpml_comm_rank(c);
    hierarchy   h = { NULL, NULL };
    hpml_status s = hierarchy_open(c, &h);
    (void)user;
    if (s != HPML_OK) return s;
    if (!h.node) return hpml_ctx_fail(hpml_comm_ctx(c), HPML_ERR_STATE, "hierarchy_open has left h->node NULL");
    nodes.node_size[r] = hpml_comm_size(h.node);
    nodes.leaders[r]   = h.leaders ? hpml_comm_size(h.leaders) : 0;
    hpml_comm_compute(c, 0.01 - hpml_comm_now(c)); /* all messages of hierarchy_open have arrived when the sum begins */
    return nodes.opens_only ? HPML_OK : hierarchy_allreduce(&h, nodes.x[r], nodes.n);
}

/* p ranks on nodes: 0: one after another, 1: dealt out, rank r on node r % nodes, 2: at random. */
static void nodes_fill(int p, int count, int layout, int64_t n)
{
    static const char *const layouts[] = { "in a row", "dealt out", "at random" };
    nodes = (nodes_run){ .p = p, .nodes = count, .n = n, .whole_numbers = true };
    for (int r = 0; r < p; r++) {
        nodes.node[r] = layout == 0 ? r * count / p : r < count || layout == 1 ? r % count : grade_int(0, count - 1);
        nodes.x[r]    = grade_floats("x", n);
    }
    snprintf(nodes.what, sizeof nodes.what, "%d ranks %s on %d nodes, %lld floats", p, layouts[layout], count,
             (long long)n);
}

/* 25 us and 125 MB/s between nodes, 1 us and 10 GB/s inside. */
static bool nodes_go(void)
{
    hpml_launch_desc launch = ranks_clock(nodes.p, 25e-6, 125e6);
    launch.only_messages    = false;
    launch.network.node     = nodes.node;
    launch.network.inside   = (hpml_link){ 1e-6, 10e9 };
    for (int r = 0; r < nodes.p; r++)
        for (int64_t i = 0; i < nodes.n; i++)
            nodes.x[r][i] = nodes.whole_numbers ? (float)grade_int(-1000, 1000) : (float)grade_real(-1, 1);
    return ranks_run(nodes.what, &launch, nodes_rank, NULL);
}

static bool communicators(void)
{
    for (int k = 0; k < 18; k++) {
        const int p = grade_int(1, 12);
        nodes_fill(p, grade_int(1, p < 5 ? p : 5), k % 3, 0);
        nodes.opens_only = true;
        if (!nodes_go()) return false;
        for (int r = 0; r < p; r++) {
            int size = 0, leader = -1;
            for (int other = p - 1; other >= 0; other--)
                if (nodes.node[other] == nodes.node[r]) {
                    size++;
                    leader = other;
                }
            if (nodes.node_size[r] != size)
                return grade_fail("%s: rank %d is on a node with %d ranks, and h->node has %d", nodes.what, r, size,
                                  nodes.node_size[r]);
            if (nodes.leaders[r] != (leader == r ? nodes.nodes : 0))
                return grade_fail("%s: h->leaders of rank %d has %d ranks (0: NULL) and should have %d: rank 0 of each "
                                  "h->node, and no other", nodes.what, r, nodes.leaders[r],
                                  leader == r ? nodes.nodes : 0);
        }
    }
    return true;
}

static bool sums(void)
{
    for (int k = 0; k < 18; k++) {
        const int p = grade_int(1, 12);
        double    sum[300] = { 0 };
        nodes_fill(p, grade_int(1, p < 5 ? p : 5), k % 3, grade_int(0, 300));
        const uint64_t state = grade_state; /* the numbers that nodes_go will draw */
        for (int r = 0; r < p; r++)
            for (int64_t i = 0; i < nodes.n; i++) sum[i] += grade_int(-1000, 1000);
        grade_state = state;
        if (!nodes_go()) return false;
        for (int r = 0; r < p; r++)
            for (int64_t i = 0; i < nodes.n; i++)
                if (nodes.x[r][i] != sum[i])
                    return grade_fail("%s: element %lld of rank %d, on node %d, is %g, the sum is %g", nodes.what,
                                      (long long)i, r, nodes.node[r], nodes.x[r][i], sum[i]);
    }
    return true;
}

static bool same_bits(void)
{
    for (int k = 0; k < 6; k++) {
        nodes_fill(8 + k, 3, k % 3, 500);
        nodes.whole_numbers = false;
        if (!nodes_go()) return false;
        for (int r = 1; r < nodes.p; r++)
            if (memcmp(nodes.x[0], nodes.x[r], 500 * sizeof(float)))
                return grade_fail("%s: ranks 0 and %d differ in the last bits", nodes.what, r);
    }
    return true;
}

/* What hierarchy_allreduce alone has sent: a run less a run of hierarchy_open. Returns virtual seconds; -1: failed. */
static double nodes_difference(rank_report *out)
{
    static rank_report opening[RANKS_MAX];
    nodes.opens_only = true;
    if (!nodes_go()) return -1;
    const double opened = ranks_end(nodes.p);
    memcpy(opening, rank_reports, sizeof opening);
    nodes.opens_only = false;
    if (!nodes_go()) return -1;
    for (int r = 0; r < nodes.p; r++) {
        out[r] = rank_reports[r];
        out[r].count.between_bytes -= opening[r].count.between_bytes;
        for (int to = 0; to < nodes.p; to++) out[r].bytes_to[to] -= opening[r].bytes_to[to];
    }
    return ranks_end(nodes.p) - opened;
}

static bool leaders_alone(void)
{
    for (int k = 0; k < 6; k++) {
        rank_report sent[RANKS_MAX];
        nodes_fill(grade_int(8, 16), 4, k % 3, 1000);
        if (nodes_difference(sent) < 0) return false;
        for (int r = 0; r < nodes.p; r++)
            for (int to = 0; to < nodes.p; to++) {
                bool leads = true;
                for (int other = 0; other < r; other++) leads = leads && nodes.node[other] != nodes.node[r];
                if (sent[r].bytes_to[to] > 0 && nodes.node[r] != nodes.node[to] && !leads)
                    return grade_fail("%s: rank %d, which is not its node's leader, has sent %lld bytes to rank %d on "
                                      "another node: inside a node ranks give their sum to the leader first",
                                      nodes.what, r, (long long)sent[r].bytes_to[to], to);
            }
    }
    return true;
}

static bool bytes_between(void)
{
    for (int k = 0; k < 9; k++) {
        rank_report   sent[RANKS_MAX];
        const int     m    = grade_int(1, 5);
        const int64_t n    = 1000 * m, most = 2 * (m - 1) * n * 4;
        int64_t       bytes = 0;
        nodes_fill(m * grade_int(1, 3) + 1, m, k % 3, n);
        if (nodes_difference(sent) < 0) return false;
        for (int r = 0; r < nodes.p; r++) bytes += sent[r].count.between_bytes;
        if (bytes > most)
            return grade_fail("%s: %lld bytes between nodes, a ring of %d leaders sends 2 (m - 1) n floats, %lld bytes",
                              nodes.what, (long long)bytes, m, (long long)most);
    }
    return true;
}

/* Between the nodes the time of a ring of m leaders, and inside a tenth of it more at most. */
static bool virtual_time(void)
{
    for (int k = 0; k < 3; k++) {
        rank_report sent[RANKS_MAX];
        const int   m = 2 + k, p = 4 * m;
        const double n = 50000.0 * m, ring = 2 * (m - 1) * (25e-6 + 4 * n / m / 125e6);
        nodes_fill(p, m, k, (int64_t)n);
        const double time = nodes_difference(sent);
        if (time < 0) return false;
        if (time > 1.2 * ring)
            return grade_fail("%s: %.2f ms in virtual time; a ring of the leaders takes %.2f ms, and inside a node, "
                              "with 10 GB/s, ranks need hardly more", nodes.what, 1e3 * time, 1e3 * ring);
    }
    return true;
}

static const grade_case cases[] = {
    { "communicators", 20, communicators },
    { "sums", 25, sums },
    { "the same bits on all ranks", 10, same_bits },
    { "only leaders talk to other nodes", 15, leaders_alone },
    { "bytes between nodes", 15, bytes_between },
    { "virtual time", 15, virtual_time },
};
int main(int argc, char **argv)
{
    ranks_deadlock = "all ranks of a communicator have to call its collectives, in the same order";
    return GRADE("07 allreduce in two levels", cases);
}
