/* Plans as data: what is printed is read back, what is wrong is named, what is refused has a reason and a way out, and
   what is not refused trains. HPML_PLANS=all (ninja plans): all pairs of values of all fields, else a sample of
   them. */
#include "../hpml.h"
#define HPML_COMM_IMPLEMENTATION /* private functions: the list of fields; hpml.h's body is compiled apart */
#include "../hpml_comm.h"
#include "plan_train.h"
#include "test.h"

static const hpml_plan_facts four = { .ranks = 4, .batch = 6, .accumulate = 1 };

static hpml_plan plan_of(const char *text)
{
    hpml_plan plan = { 0 };
    char      error[480];
    if (hpml_plan_parse(text, &plan, error, sizeof error) != HPML_OK) printf("    %s\n", error);
    return plan;
}

/* Numbers are read and printed with a point and to the last bit. */
TEST(numbers_are_read_to_the_last_bit)
{
    static const float values[] = { 1e-38f, 1.17549435e-38f, 0.1f, 0.333333343f, 0.00123456789f, 1, 0.99999994f, 9e29f,
                                    3.40282347e+29f, 7e-45f };
    char text[64], again[64];
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        hpml_plan plan = { .strategy = HPML_STRATEGY_BLOCK, .outer_lr = values[i] }, back = { 0 };
        hpml_plan_text(&plan, false, text, sizeof text);
        ENSURE(hpml_plan_parse(text, &back, again, sizeof again) == HPML_OK && back.outer_lr == values[i]);
    }
    ENSURE(plan_of("outer_lr=2.5e-3").outer_lr == 2.5e-3f && plan_of("outer_lr=.5").outer_lr == 0.5f);
}

/* All plans that hpml_plan_next visits: each is printed and read back as it was, with few fields and with all. */
TEST(plans_are_printed_and_read_back)
{
    hpml_plan plan = { 0 };
    int       count = 0;
    do {
        char text[2048], error[480];
        for (int all = 0; all < 2 && count % 53 == 0; all++) {
            hpml_plan again = { .history = all ? 9 : 0 };
            int       length = hpml_plan_text(&plan, all, text, sizeof text);
            ENSURE(length == (int)strlen(text) && length == hpml_plan_text(&plan, all, NULL, 0));
            ENSURE(hpml_plan_parse(text, &again, error, sizeof error) == HPML_OK);
            ENSURE(hpml_plan_differs(&plan, &again, text, sizeof text) == 0 && text[0] == 0);
        }
        ENSURE(hpml_plan_check(&plan, &four, NULL, 0) == HPML_OK);
        count++;
    } while (hpml_plan_next(&plan, &four));
    hpml_plan zero = { 0 };
    printf("    %d plans\n", count);
    ENSURE(count > 10000 && hpml_plan_differs(&plan, &zero, NULL, 0) == 0);
}

/* Stepping through all combinations one by one finds as many plans. */
TEST_LONG(plans_that_are_left_out_are_refused)
{
    hpml_plan plan = { 0 }, next = { 0 };
    int       all = 1, count = 1, i;
    bool      matters[HPMLC_FIELDS];
    while (hpml_plan_next(&next, &four)) count++;
    do {
        i = HPMLC_FIELDS - 1;
        hpmlc_fields_matter(&plan, matters);
        while (i >= 0 && !(matters[i] && hpmlc_field_next(&hpmlc_fields[i], &plan))) i--;
        all += i >= 0 && hpml_plan_check(&plan, &four, NULL, 0) == HPML_OK;
    } while (i >= 0);
    ENSURE(all == count);
}

TEST(a_plan_is_read_from_text)
{
    static const char sorted[] = "exact=1,leaf=3,codec=topk,codec.ratio=0.25,codec.seed=18446744073709551615,"
                                 "algorithm=ring";
    hpml_plan plan = plan_of("algorithm=ring,codec=topk,codec.ratio=0.25,exact=1,leaf=3,"
                             "codec.seed=18446744073709551615");
    char      text[512];
    ENSURE(plan.codec.kind == HPML_CODEC_TOPK && plan.codec.ratio == 0.25f && plan.exact && plan.leaf == 3);
    ENSURE(plan.algorithm == HPML_RING && plan.codec.seed == UINT64_MAX && !plan.delayed);
    int length = hpml_plan_text(&plan, false, text, sizeof text);
    ENSURE(strcmp(text, sorted) == 0);
    ENSURE(hpml_plan_text(&plan, false, text, 9) == length && strcmp(text, "exact=1,") == 0); /* as snprintf cuts */
    hpml_plan other = plan_of("exact=1,leaf=4,codec=onebit");
    ENSURE(hpml_plan_differs(&plan, &other, text, sizeof text) == 5);
    ENSURE(strcmp(text, "leaf 3 to 4, codec topk to onebit, codec.ratio 0.25 to 0, "
                        "codec.seed 18446744073709551615 to 0, algorithm ring to auto") == 0);
}

TEST(wrong_words_are_named)
{
    static const char *const wrong[][3] = { /* text; what the error names; what it says is possible */
        { "exact=1,strategie=sync", "\"strategie\"", "strategy, servers, backup" },
        { "strategy=sinc", "strategy=sinc", "take sync" },
        { "codec=zip", "codec=zip", "none, bf16, onebit" },
        { "algorithm=", "algorithm= ", "auto, central" },
        { "exact", "exact=", "whole number from 0 to 1" },
        { "exact=2", "exact=2", "from 0 to 1" },
        { "exact=yes", "exact=yes", "from 0 to 1" },
        { "history=3000000000", "history=3000000000", "from 0 to 2147483647" },
        { "leaf=-1", "leaf=-1", "from 0" },
        { "leaf=99999999999999999999", "leaf=9999", "whole number" },
        { "leaf=2.5", "leaf=2.5", "whole number" },
        { "codec.ratio=1.5", "codec.ratio=1.5", "a number from 0 to 1" },
        { "codec.ratio=nan", "codec.ratio=nan", "a number from 0 to 1" },
        { "codec.ratio=.5.", "codec.ratio=.5.", "a number from 0 to 1" },
        { "codec.seed=-1", "codec.seed=-1", "whole number" },
        { "exact=1,,leaf=1", "\"\"", "fields are" },
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        hpml_plan plan = { .leaf = 7 };
        char      error[480];
        ENSURE(hpml_plan_parse(wrong[i][0], &plan, error, sizeof error) == HPML_ERR_ARGUMENT);
        bool named = strstr(error, wrong[i][1]) && strstr(error, wrong[i][2]);
        if (!named) printf("    %s: %s\n", wrong[i][0], error);
        ENSURE(named && plan.leaf == 7 && !plan.exact);
        ENSURE(hpml_plan_parse(wrong[i][0], &plan, NULL, 0) == HPML_ERR_ARGUMENT);
    }
    ENSURE(hpml_plan_parse(NULL, NULL, NULL, 0) == HPML_ERR_ARGUMENT);
}

/* One plan, and facts, for each rule: the sentence names both sides and a way out. */
typedef struct refusal {
    const char     *plan;
    hpml_plan_facts facts;
    const char     *names[3];
} refusal;

#define FOUR_RANKS .ranks = 4, .batch = 6, .accumulate = 1
static const refusal refusals[] = {
    { "global_batch=25", { FOUR_RANKS }, { "global_batch", "ranks", "smaller global_batch" } },
    { "exact=1,leaf=4,global_batch=24", { FOUR_RANKS },
      { "global_batch", "ranks", "larger batch" } },
    { "algorithm=native", { FOUR_RANKS }, { "algorithm", "transport", "take algorithm auto" } },
    { "leaf=7", { FOUR_RANKS }, { "leaf", "batch", "smaller leaf" } },
    { "exact=1,delayed=1", { FOUR_RANKS }, { "exact", "delayed", "set one" } },
    { "exact=1,sum=1", { FOUR_RANKS }, { "exact", "sum", "set one" } },
    { "exact=1,warm_steps=3", { FOUR_RANKS }, { "exact", "warm_steps", "set one" } },
    { "exact=1,codec=topk", { FOUR_RANKS }, { "exact", "codec", "take codec onebit" } },
    { "exact=1,codec=lowrank", { FOUR_RANKS }, { "exact", "codec", "take codec onebit" } },
    { "exact=1,sync_batchnorm=1", { FOUR_RANKS }, { "exact", "sync_batchnorm", "set one" } },
    { "exact=1", { .ranks = 4, .batch = 6, .accumulate = 2 }, { "exact", "accumulate", "set accumulate to 1" } },
    { "exact=1", { FOUR_RANKS, .mixes_samples = 1 }, { "exact", "mixes", "leave exact out" } },
    { "exact=1", { FOUR_RANKS, .overflows = 1 }, { "exact", "f16", "bf16" } },
    { "codec=onebit", { FOUR_RANKS, .overflows = 1 }, { "codec", "f16", "codec none" } },
    { "delayed=1", { FOUR_RANKS, .overflows = 1 }, { "delayed", "f16", "loss_scale" } },
    { "strategy=local", { FOUR_RANKS, .overflows = 1 }, { "strategy", "f16", "bf16" } },
    { "strategy=ps", { FOUR_RANKS }, { "strategy", "servers", "set servers to 1" } },
    { "strategy=async,servers=4", { FOUR_RANKS }, { "ranks", "servers", "fewer servers" } },
    { "strategy=backup,servers=1", { FOUR_RANKS }, { "backup", "workers", "strategy ps" } },
    { "strategy=backup,servers=1,backup=3", { FOUR_RANKS },
      { "backup", "workers", "strategy ps" } },
    { "strategy=ssp,servers=1,codec=onebit,warm_steps=2", { FOUR_RANKS },
      { "servers", "warm_steps", "strategy sync" } },
    { "strategy=async,servers=1", { FOUR_RANKS, .overflows = 1 }, { "strategy", "f16", "strategy sync" } },
    { "strategy=ps,servers=2,codec=lowrank", { FOUR_RANKS },
      { "servers", "lowrank", "take codec" } },
    { "strategy=ps,servers=1", { FOUR_RANKS, .steps_tensors = 1 }, { "servers", "optimizer", "take sgd" } },
    { "strategy=ssp,servers=2", { FOUR_RANKS, .clips = 1 }, { "clip_norm", "servers", "servers=1" } },
    { "route=factors,exact=1", { FOUR_RANKS }, { "exact", "factors", "take route allreduce" } },
    { "strategy=ps,servers=1,route=factors,codec=onebit", { FOUR_RANKS },
      { "codec", "factors", "take route allreduce" } },
    { "route=hybrid,codec=onebit", { FOUR_RANKS }, { "codec", "hybrid", "take route allreduce" } },
    { "route=factors", { .ranks = 4, .batch = 6, .accumulate = 2 },
      { "accumulate", "factors", "set accumulate to 1" } },
    { "route=hybrid", { FOUR_RANKS, .no_factors = 1 }, { "halves", "hybrid", "take route allreduce" } },
    { "delayed=1", { FOUR_RANKS, .sparse = 1 }, { "sparse", "delayed", "leave .sparse" } },
    { "strategy=federated,servers=1", { FOUR_RANKS, .sparse = 1 },
      { "sparse", "federated", "leave .sparse" } },
    { "codec=onebit", { FOUR_RANKS, .sparse = 1 }, { "sparse", "codec", "plain sync" } },
    { "strategy=local,shard=1", { .ranks = 4, .batch = 6 }, { "strategy", "shard", "shard 0" } },
    { "strategy=local", { .ranks = 4, .batch = 6, .device = true, .host_states = true },
      { "host_optimizer", "states", "strategy sync" } },
    { "shard=2,pipe=2,schedule=interleaved", { .ranks = 4, .batch = 6 }, { "interleaved", "shard", "shard=1" } },
    { "recompute=1,memory=1000000", { .ranks = 4, .batch = 6 }, { "recompute", "memory", "leave one of them out" } },
    { "shard=1,delayed=1", { .ranks = 4, .batch = 6 }, { "delayed", "shard", "shard 0" } },
    { "shard=1,codec=onebit", { .ranks = 4, .batch = 6 }, { "codec", "shard", "codec none" } },
    { "shard=1,algorithm=tree", { .ranks = 4, .batch = 6 }, { "algorithm", "shard", "auto or ring" } },
    { "shard=1", { .ranks = 4, .batch = 6, .steps_whole = true }, { "optimizer", "shard", "another optimizer" } },
    { "host_optimizer=1", { FOUR_RANKS }, { "host_optimizer", "device", "leave it out" } },
    { "shard=1", { .ranks = 4, .batch = 6, .device = true }, { "device", "shard", "CPU backend" } },
    { "strategy=hogwild", { FOUR_RANKS, .sparse = 1 }, { "hogwild", "virtual time", "transport threads" } },
    { "strategy=ps,servers=2,tensor=2", { FOUR_RANKS }, { "servers", "tensor", "strategy sync" } },
    { "strategy=hogwild,pipe=2", { FOUR_RANKS, .together = 1 }, { "hogwild", "pipe", "strategy sync" } },
    { "strategy=local,sequence=2", { FOUR_RANKS }, { "sequence", "strategy", "take strategy" } },
    { "expert=2,sum=1", { FOUR_RANKS }, { "expert", "sum", "leave these out" } },
    { "pipe=2,exact=1", { FOUR_RANKS }, { "exact", "pipe", "leave exact out" } },
    { "tensor=2,codec=topk", { FOUR_RANKS }, { "tensor", "topk", "take codec onebit" } },
    { "tensor=4,route=hybrid", { FOUR_RANKS }, { "hybrid", "tensor", "take route" } },
    { "tensor=2", { FOUR_RANKS, .sparse = 1 }, { "sparse", "tensor", "leave .sparse" } },
    { "tensor=2", { .ranks = 4, .batch = 6, .steps_whole = true }, { "optimizer", "tensor", "another optimizer" } },
    { "tensor=2", { .ranks = 4, .batch = 6, .steps_tensors = true, .device = true },
      { "norms", "tensor", "sgd or adam" } },
    { "pipe=2", { FOUR_RANKS, .overflows = 1 }, { "f16", "pipe", "loss_scale" } },
    { "pipe=2,micro=7", { FOUR_RANKS }, { "micro", "batch", "smaller micro" } },
    { "pipe=2", { FOUR_RANKS, .device = 1 }, { "pipeline", "device", "take pipe=1" } },
    { "pipe=2,sync_batchnorm=1", { FOUR_RANKS }, { "sync_batchnorm", "pipe", "leave it out" } },
    { "pipe=2,micro=2", { FOUR_RANKS, .mixes_samples = 1 }, { "micro", "mixes", "take micro=1" } },
    { "pipe=2,schedule=stash,delayed=1", { FOUR_RANKS }, { "stash", "delayed", "take schedule 1f1b" } },
    { "pipe=2,schedule=stash", { FOUR_RANKS, .clips = true }, { "stash", "clip_norm", "take schedule 1f1b" } },
    { "pipe=4,schedule=vertical", { .ranks = 4, .batch = 6, .accumulate = 2 },
      { "vertical", "accumulate", "set accumulate to 1" } },
};

TEST(each_rule_names_both_sides_and_a_way_out)
{
    enum { COUNT = sizeof refusals / sizeof refusals[0] };
    char why[COUNT][480];
    for (int i = 0; i < COUNT; i++) {
        hpml_plan plan = plan_of(refusals[i].plan);
        ENSURE(hpml_plan_check(&plan, &refusals[i].facts, why[i], sizeof why[i]) == HPML_ERR_UNSUPPORTED);
        bool named = strstr(why[i], "plan: ") == why[i];
        for (int k = 0; k < 3; k++) named = named && strstr(why[i], refusals[i].names[k]);
        if (!named) printf("    %s: %s\n", refusals[i].plan, why[i]);
        ENSURE(named);
        ENSURE(hpml_plan_check(&plan, &refusals[i].facts, NULL, 0) == HPML_ERR_UNSUPPORTED);
    }
    int tripped = 1; /* the rule of a plan that was not cleared, below */
#define COUNT_RULE(is_refused, sentence) \
    for (int i = 0; i < COUNT; i++) \
        if (strncmp(why[i] + strlen("plan: "), sentence, strlen(sentence)) == 0) { tripped++; break; }
    HPMLC_PLAN_NEEDS(COUNT_RULE)
    HPMLC_PLAN_RULES(COUNT_RULE)
#undef COUNT_RULE
    int rules = 0;
#define COUNT_RULE(is_refused, sentence) rules++;
    HPMLC_PLAN_NEEDS(COUNT_RULE)
    HPMLC_PLAN_RULES(COUNT_RULE)
#undef COUNT_RULE
    ENSURE(tripped == rules);
    hpml_plan dirty = { ._end = 1 }, high = { .leaf = -5 };
    ENSURE(hpml_plan_check(&dirty, &four, why[0], sizeof why[0]) != HPML_OK && strstr(why[0], "cleared"));
    ENSURE(hpml_plan_check(&high, &four, why[0], sizeof why[0]) == HPML_ERR_ARGUMENT && strstr(why[0], "leaf=-5"));
    high = (hpml_plan){ .strategy = (hpml_strategy_kind)99 };
    ENSURE(hpml_plan_check(&high, &four, why[0], sizeof why[0]) == HPML_ERR_ARGUMENT && strstr(why[0], "strategy=99"));
    ENSURE(hpml_plan_check(NULL, &four, NULL, 0) != HPML_OK && hpml_plan_check(&high, NULL, NULL, 0) != HPML_OK);
    ENSURE(!hpml_strategy_name((hpml_strategy_kind)99) && strcmp(hpml_strategy_name(HPML_STRATEGY_SYNC), "sync") == 0);
}

/* Fields of one strategy are refused with others. */
TEST(a_field_that_the_strategy_does_not_use_is_refused)
{
    static const char *const wrong[][2] = {
        { "period=10", "period" }, { "elastic=0.5", "elastic" }, { "topology=wheel", "topology" }, { "seed=4", "seed" },
        { "outer_lr=1", "outer_lr" }, { "outer_momentum=0.5", "outer_momentum" },
        { "strategy=local,outer_nesterov=1", "outer_nesterov" }, { "strategy=gossip,codec=onebit", "codec" },
        { "strategy=elastic,exact=1", "exact" }, { "strategy=async,servers=1,exact=1", "exact" },
        { "strategy=federated,servers=1,route=factors", "route" },
        { "strategy=local,delayed=1", "delayed" }, { "strategy=local,sum=1", "sum" },
        { "strategy=block,sync_batchnorm=1", "sync_batchnorm" }, { "strategy=local,bucket_bytes=1", "bucket_bytes" },
        { "strategy=local,no_overlap=1", "no_overlap" },
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        hpml_plan plan = plan_of(wrong[i][0]);
        char      why[480], want[64];
        ENSURE(hpml_plan_check(&plan, &four, why, sizeof why) == HPML_ERR_UNSUPPORTED);
        snprintf(want, sizeof want, "plan: %s is for strateg", wrong[i][1]);
        ENSURE(strstr(why, want) == why && strstr(why, "this plan has strategy=") && strstr(why, "to 0"));
    }
}

/* Trains in virtual time. */
static hpml_status run(plan_trial *j)
{
    hpml_launch_desc l = { .transport = HPML_TRANSPORT_CLOCK, .ranks = 4, .timeout = 20,
                           .ctx = { .seed = 3, .threads = 1 }, .network.inside.latency = 1e-5 };
    return hpml_launch(&l, plan_train, j, j->text, sizeof j->text);
}

/* Axes and servers make the number of ranks; the sentence has the product and a way out. */
TEST(axes_make_the_number_of_ranks)
{
    static const struct {
        const char *plan;
        int         ranks;
        const char *says; /* NULL: possible */
    } cases[] = {
        { "tensor=2", 8, NULL },
        { "data=2,tensor=2,pipe=2", 8, NULL },
        { "data=3,strategy=async,servers=1", 4, NULL },
        { "data=2,pipe=2,tensor=3", 8, "data 2 x pipe 2 x tensor 3 + servers 0 = 12 ranks, and 8 were started; make" },
        { "data=2", 3, "data 2 + servers 0 = 2 ranks, and 3 were started; make the product 3" },
        { "data=4,strategy=async,servers=1", 4, "data 4 + servers 1 = 5 ranks, and 4 were started; make" },
        { "tensor=3", 8, "8 ranks are no multiple of tensor 3 = 3 ranks; make the product a divisor of 8" },
        { "pipe=16", 8, "8 ranks are no multiple of pipe 16 = 16 ranks" },
        { "data=65536,pipe=65536,tensor=65536,sequence=65536,expert=65536", 8, "ranks, and 8 were started" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        hpml_plan       plan  = plan_of(cases[i].plan);
        hpml_plan_facts facts = { .ranks = cases[i].ranks, .batch = 6 };
        char            why[480] = "";
        hpml_status     status = hpml_plan_check(&plan, &facts, why, sizeof why);
        bool            good   = cases[i].says ? status == HPML_ERR_ARGUMENT : status == HPML_OK;
        if (cases[i].says) good = good && strstr(why, cases[i].says);
        if (!good) printf("    %s, %d ranks: %s\n", cases[i].plan, cases[i].ranks, why);
        ENSURE(good);
    }
    hpml_plan       plan  = plan_of("pipe=2,tensor=2,sequence=2"), whole; /* samples: those of the shares */
    hpml_plan_facts facts = { .ranks = 16, .batch = 6 };
    hpml_plan_resolve(&plan, &facts, &whole);
    ENSURE(whole.global_batch == 12);
    plan.expert = 2;
    hpml_plan_resolve(&plan, &facts, &whole);
    ENSURE(whole.global_batch == 12);
}

TEST(a_plan_from_the_environment)
{
    plan_trial own = { .plan.codec = { .kind = HPML_CODEC_ONEBIT, .min_elements = 16 } }, none = { .odd_rank = false };
    ENSURE(run(&own) == HPML_OK && run(&none) == HPML_OK && own.hash != none.hash);
    setenv("HPML_PLAN", "codec=onebit,codec.min_elements=16", 1);
    plan_trial both = none;
    ENSURE(run(&both) == HPML_OK && both.hash == own.hash);
    setenv("HPML_PLAN", "codec=none", 1); /* takes the place of the program's own field */
    both = own;
    ENSURE(run(&both) == HPML_OK && both.hash == none.hash);
    setenv("HPML_PLAN", "codec=none,strategy=simultaneous", 1);
    ENSURE(run(&both) == HPML_ERR_ARGUMENT && strstr(both.text, "HPML_PLAN") && strstr(both.text, "simultaneous"));
    unsetenv("HPML_PLAN");
    plan_trial odd = { .odd_rank = true };
    ENSURE(run(&odd) == HPML_ERR_ARGUMENT && strstr(odd.text, "different plans"));
}

/* Trains three steps by the plan, or has a sentence why not. */
typedef struct tally { int trained, refused, skipped; bool all; hpml_rng rng; char why[16][480]; } tally;

static bool tried(tally *sum, const hpml_plan *plan, int one_in)
{
    plan_trial j = { .plan = *plan };
    char  why[480], text[512];
    if (!sum->all && hpml_rng_below(&sum->rng, one_in) > 0) { sum->skipped++; return true; }
    hpml_status status = hpml_plan_check(plan, &four, why, sizeof why);
    if (status != HPML_OK) {
        sum->refused++;
        return strstr(why, "plan: ") == why && strlen(why) > 30;
    }
    sum->trained++;
    if (run(&j) == HPML_OK && j.made == 3 && j.same) return true;
    hpml_plan_text(plan, false, text, sizeof text);
    printf("    %s: %lld steps, %s\n", text, (long long)j.made, j.text);
    return false;
}

/* Less memory for more work: the same bits; a budget that cannot be met names the least bytes on all ranks. */
TEST(recompute_and_memory_change_no_bit)
{
    static const char *const plans[] = { "", "recompute=1", "memory=2500", "pipe=2", "pipe=2,recompute=1" };
    uint64_t want = 0;
    for (int i = 0; i < 5; i++) {
        plan_trial j = { .plan = plan_of(plans[i]) };
        hpml_launch_desc l = { .transport = HPML_TRANSPORT_CLOCK, .ranks = 4, .timeout = 20, .plan = &j.plan,
                               .ctx = { .seed = 3, .threads = 1 } };
        hpml_status status = hpml_launch(&l, plan_train, &j, j.text, sizeof j.text);
        if (status != HPML_OK) printf("    %s: %s\n", plans[i], j.text);
        ENSURE(status == HPML_OK && (j.same || j.plan.pipe > 1));
        if (i == 0 || i == 3) want = j.hash;
        ENSURE(j.hash == want);
    }
    plan_trial none = { .plan = plan_of("memory=100") };
    ENSURE(run(&none) == HPML_ERR_MEMORY && strstr(none.text, "the least that was found is"));
}

static hpml_status device_steps(void *device, hpml_ctx *ctx, const hpml_update *updates, int count)
{
    (void)device, (void)updates, (void)count;
    return hpml_ctx_fail(ctx, HPML_ERR_STATE, "the device steps");
}

/* On a device (here with memory of the host) a plan with host_optimizer steps on the host: the bits of the CPU. */
TEST(a_plan_keeps_states_of_a_device_on_the_host)
{
    hpml_backend device = *hpml_backend_cpu();
    uint64_t     want   = 0;
    device.name   = "away";
    device.host   = false;
    device.update = device_steps;
    for (int i = 0; i < 3; i++) {
        plan_trial       j = { .plan = plan_of(i == 1 ? "host_optimizer=1" : "") };
        hpml_launch_desc l = { .transport = HPML_TRANSPORT_CLOCK, .ranks = 4, .timeout = 20, .plan = &j.plan,
                               .ctx = { .seed = 3, .threads = 1, .backend = i > 0 ? &device : NULL } };
        hpml_status status = hpml_launch(&l, plan_train, &j, j.text, sizeof j.text);
        if (i == 2) ENSURE(status != HPML_OK && strstr(j.text, "the device steps"));
        if (i == 2) break;
        if (status != HPML_OK) printf("    %s\n", j.text);
        ENSURE(status == HPML_OK && j.same);
        if (i == 0) want = j.hash;
        ENSURE(j.hash == want);
    }
}

TEST(all_pairs_of_values_train_or_are_refused)
{
    const char *how = getenv("HPML_PLANS");
    tally       sum = { .all = how && strcmp(how, "all") == 0, .rng.seed = how ? (uint64_t)atoi(how) : 1 };
    const int   one_in = SLOW_BUILD ? 60 : 6;
    for (int strategy = 0; strategy < HPML_STRATEGY_COUNT; strategy++) {
        hpml_plan base = { .strategy = (hpml_strategy_kind)strategy };
        ENSURE(tried(&sum, &base, 1));
        for (int i = 1; i < HPMLC_FIELDS; i++)
            for (hpml_plan one = base; hpmlc_field_next(&hpmlc_fields[i], &one);) {
                ENSURE(tried(&sum, &one, one_in));
                for (int k = i + 1; k < HPMLC_FIELDS; k++)
                    for (hpml_plan two = one; hpmlc_field_next(&hpmlc_fields[k], &two);)
                        ENSURE(tried(&sum, &two, one_in));
            }
    }
    printf("    %d plans trained, %d refused, %d left out\n", sum.trained, sum.refused, sum.skipped);
    ENSURE(sum.trained > 5 && sum.refused > 0);
}
