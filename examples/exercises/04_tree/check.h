/* Exercise 04: checks a broadcast and a reduction by a binomial tree. */
#include "../ranks.h"

/* Rank `root` has x, n floats, and afterwards all ranks have them. */
hpml_status tree_broadcast(hpml_comm *c, float *x, int64_t n, int root);

/* Afterwards x on rank `root` is the sum of the x of all ranks; on the others x may be anything. spare: n floats. */
hpml_status tree_reduce(hpml_comm *c, float *x, int64_t n, float *spare, int root);

typedef struct tree_run {
    int     p, root;
    bool    reduces;
    int64_t n;
    float  *x[RANKS_MAX], *spare[RANKS_MAX], *expected;
    char    what[96];
} tree_run;
static tree_run tree;

static hpml_status tree_rank(hpml_comm *c, void *user)
{
    const int r = hpml_comm_rank(c);
    (void)user;
    if (tree.reduces) return tree_reduce(c, tree.x[r], tree.n, tree.spare[r], tree.root);
    return tree_broadcast(c, tree.x[r], tree.n, tree.root);
}

/* Runs a broadcast, or a reduction, and compares what ranks have with what they should have. */
static bool tree_go(const hpml_launch_desc *launch, int64_t n, bool reduces, int root)
{
    tree = (tree_run){ .p = launch->ranks, .root = root, .reduces = reduces, .n = n };
    snprintf(tree.what, sizeof tree.what, "%s, %d ranks, %lld floats, root %d", reduces ? "reduce" : "broadcast",
             tree.p, (long long)n, root);
    tree.expected = grade_floats("the checker's sums", n);
    for (int64_t i = 0; i < n; i++) tree.expected[i] = 0;
    for (int r = 0; r < tree.p; r++) {
        tree.x[r]     = grade_floats("x", n);
        tree.spare[r] = grade_floats("spare", n);
        for (int64_t i = 0; i < n; i++) {
            tree.x[r][i] = (float)grade_int(-1000, 1000);
            if (reduces || r == root) tree.expected[i] += tree.x[r][i];
        }
    }
    if (!ranks_run(tree.what, launch, tree_rank, NULL)) return false;
    for (int r = 0; r < tree.p; r++)
        for (int64_t i = 0; i < n && (!reduces || r == root); i++)
            if (tree.x[r][i] != tree.expected[i])
                return grade_fail("%s: element %lld of rank %d is %g and should be %g%s", tree.what, (long long)i, r,
                                  tree.x[r][i], tree.expected[i],
                                  reduces ? "" : root ? "; number the ranks from the root: (rank - root + p) % p" : "");
    return true;
}

static bool results(bool reduces)
{
    for (int p = 1; p <= 9; p++) {
        const hpml_launch_desc clock = ranks_clock(p, 1e-6, 1e9), threads = ranks_threads(p);
        if (!tree_go(&clock, grade_int(1, 300), reduces, 0)) return false;
        if (!tree_go(&threads, grade_int(100, 300), reduces, 0)) return false;
    }
    return true;
}
static bool broadcasts(void) { return results(false); }
static bool reductions(void) { return results(true); }

static bool any_root(void)
{
    for (int p = 2; p <= 9; p++) {
        const hpml_launch_desc clock = ranks_clock(p, 1e-6, 1e9);
        for (int reduces = 0; reduces < 2; reduces++)
            for (int root = 1; root < p; root++)
                if (!tree_go(&clock, grade_int(0, 50), reduces, root)) return false;
    }
    return true;
}

static int levels(int p)
{
    int levels = 0;
    while (1 << levels < p) levels++;
    return levels;
}

static bool messages(void)
{
    for (int p = 1; p <= 20; p++)
        for (int reduces = 0; reduces < 2; reduces++) {
            const hpml_launch_desc clock = ranks_clock(p, 1e-6, 1e9);
            int64_t                count = 0, bytes = 0;
            if (!tree_go(&clock, 100, reduces, grade_int(0, p - 1))) return false;
            for (int r = 0; r < p; r++) {
                count += rank_reports[r].count.messages;
                bytes += rank_reports[r].count.bytes;
            }
            if (count != p - 1 || bytes != (p - 1) * 400)
                return grade_fail("%s: %lld messages with %lld bytes; every rank but one receives, or sends, the array "
                                  "once: p - 1 = %d messages with %d bytes", tree.what, (long long)count,
                                  (long long)bytes, p - 1, (p - 1) * 400);
            for (int r = 0; r < p; r++) {
                int64_t partners = 0;
                for (int other = 0; other < p; other++)
                    partners += reduces ? rank_reports[other].messages_to[r] : rank_reports[r].messages_to[other];
                if (partners > levels(p))
                    return grade_fail("%s: rank %d %s %lld arrays; in a tree no rank has more than ceil(log2 p) = %d, "
                                      "because others %s", tree.what, r, reduces ? "receives" : "sends",
                                      (long long)partners, levels(p),
                                      reduces ? "have added up some of them before" : "pass on what they have");
            }
        }
    return true;
}

static bool chains(void)
{
    for (int p = 2; p <= 33; p = p * 3 / 2 + 1)
        for (int reduces = 0; reduces < 2; reduces++) {
            const hpml_launch_desc clock = ranks_clock(p, 1e-6, 1e9);
            if (!tree_go(&clock, 10, reduces, grade_int(0, p - 1))) return false;
            if (ranks_depth(p) > levels(p))
                return grade_fail("%s: %lld messages follow each other, in a binomial tree ceil(log2 p) = %d: in "
                                  "each round %s", tree.what, (long long)ranks_depth(p), levels(p),
                                  reduces ? "half of the sums that are left are sent" :
                                            "all ranks that have the array send it");
        }
    return true;
}

/* An array takes 1 s on the wire and no latency: the clock counts rounds, because a card sends one message after
   another, and receives one after another. */
static bool rounds(void)
{
    for (int p = 2; p <= 33; p = p * 3 / 2 + 1)
        for (int reduces = 0; reduces < 2; reduces++) {
            const hpml_launch_desc clock = ranks_clock(p, 0, 4000);
            if (!tree_go(&clock, 1000, reduces, grade_int(0, p - 1))) return false;
            if (ranks_end(p) > levels(p) + 0.01)
                return grade_fail("%s: an array takes 1 s on the wire, and all together take %.2f s; ceil(log2 p) = %d "
                                  "s are enough: a rank serves its largest subtree %s", tree.what, ranks_end(p),
                                  levels(p), reduces ? "last" : "first");
        }
    return true;
}

static const grade_case cases[] = {
    { "broadcast from rank 0", 20, broadcasts },
    { "reduce to rank 0", 20, reductions },
    { "any root", 15, any_root },
    { "messages and bytes", 15, messages },
    { "longest chain of messages", 10, chains },
    { "rounds", 20, rounds },
};
int main(int argc, char **argv) { return GRADE("04 broadcast and reduce by a tree", cases); }
