/* A tour of plans and what surrounds them: texts, defaults, differences, roles, forecasts, a distributed training's own
   functions. Difficulty 2 of 4.
   cc -O2 examples/tour/6_plans.c -o plans -lm -lpthread && ./plans
   prints the conditions that hold, and WRONG before one that does not; exits with 1 then. */
#define HPML_IMPLEMENTATION
#include "../../hpml_comm.h"
#include "tour.h"
#include <math.h>
#include <string.h>

#define SHOW_AT(c, condition) do { if (hpml_comm_rank(c) == 0) SHOW(condition); } while (0)

static void texts(void)
{
    char            text[512], why[512];
    hpml_plan       zero = { 0 }, plan = { 0 }, all;
    hpml_plan_facts facts = { .ranks = 4, .batch = 8 };
    hpml_plan_parse("strategy=ssp,servers=1,staleness=3", &plan, why, sizeof why);
    SHOW(hpml_plan_check(&plan, &facts, why, sizeof why) == HPML_OK);
    SHOW(hpml_plan_differs(&zero, &plan, text, sizeof text) == 3 && strstr(text, "staleness"));
    hpml_plan_resolve(&plan, &facts, &all);
    SHOW(all.servers == 1 && all.staleness == 3);
    SHOW(strcmp(hpml_route_name(HPML_ROUTE_FACTORS), "factors") == 0);
    SHOW(strcmp(hpml_axis_name(HPML_AXIS_TENSOR), "tensor") == 0);
}

static void roles(void)
{
    char                why[256], address[64];
    int                 task = -1;
    int32_t             server[3];
    int64_t             floats[2];
    hpml_cluster        cluster;
    const hpml_gradient tensors[3] = { { "a", NULL, 10, 10 }, { "b", NULL, 1, 10 }, { "c", NULL, 2, 10 } };
    hpml_cluster_parse("worker=n1:1,n2:1 ps=n3:1", &cluster, why, sizeof why);
    SHOW(hpml_cluster_rank(&cluster, "ps", 0) == 2);
    SHOW(strcmp(hpml_cluster_role(&cluster, 1, &task), "worker") == 0 && task == 1);
    SHOW(hpml_cluster_address(&cluster, 2, address, sizeof address) == 4 && strcmp(address, "n3:1") == 0);
    hpml_place_round_robin(tensors, 3, 2, server, floats);
    SHOW(server[0] == 0 && server[1] == 1 && server[2] == 0 && floats[0] == 120 && floats[1] == 10);
}

static void forecasts(void)
{
    hpml_network net = { .ranks_per_node = 1, .between = { 20e-6, 125e6 } };
    SHOW(hpml_amdahl(0.5, 1e9) < 2.001);        /* half of the work cannot be divided */
    SHOW(hpml_optimal_ranks(10, 1, 2) == 10);   /* then communication takes as long as computation */
    hpml_fabric fly;
    SHOW(hpml_fabric_measure(HPML_FABRIC_SLIM_FLY, 50, &fly) && fly.degree == 7 && fly.diameter == 2);
    double ring = hpml_simulate_allreduce(HPML_RING, 8, &net, 1 << 20);
    SHOW(ring < hpml_simulate_allreduce(HPML_CENTRAL, 8, &net, 1 << 20));
}

static hpml_status train(hpml_comm *c, void *user)
{
    const float       cases[8] = { 0, 0, 0, 1, 1, 0, 1, 1 };
    const int32_t     answers[4] = { 0, 1, 1, 0 };
    hpml_ctx         *ctx = hpml_comm_ctx(c);
    hpml_plan_facts   facts;
    hpml_step_row     rows[16];
    double            times;
    float             one = (float)hpml_comm_rank(c) + 1;
    hpml_tensor      *x = hpml_input_2d(ctx, 4, 2);
    hpml_trainer_desc d = { .input = x, .output = hpml_linear(hpml_tanh(hpml_linear(x, 8, NULL)), 2, NULL) };
    hpml_trainer     *t = hpml_trainer_create(ctx, &d);
    (void)user;
    hpml_plan_facts_of(t, c, &facts);
    SHOW_AT(c, facts.ranks == 2 && facts.batch == 4 && facts.together);
    /* The same training on a machine by name, and on this one. */
    char             text[512], why[512], record[4000];
    hpml_layer_facts layer[16];
    hpml_model_facts model;
    hpml_prediction  p;
    hpml_machine     mine;
    SHOW_AT(c, hpml_model_facts_of(t, c, layer, 16, &model) > 0);
    SHOW_AT(c, hpml_forecast(&(hpml_plan){ 0 }, &model, hpml_machine_find("dgx-2"), &p, why, sizeof why) == HPML_OK);
    SHOW_AT(c, hpml_prediction_text(&p, text, sizeof text) > 0 && p.step_s > 0);
    SHOW_AT(c, hpml_machine_measure(ctx, &mine) == HPML_OK && mine.flops > 0);
    hpml_distributed *dist = hpml_distribute(t, c, &(hpml_plan){ .history = 8 });
    SHOW_AT(c, hpml_distribute_route(dist, 0) == HPML_ROUTE_ALLREDUCE);
    for (int step = 0; step < 4; step++) hpml_trainer_step(t, cases, answers, 4, NULL);
    int count = hpml_distribute_steps(dist, rows, 16);
    SHOW_AT(c, count == 8 && hpml_steps_slowest(rows, count, &times) >= 0); /* 4 steps of 2 ranks */
    /* Its forecast, on this machine as it is measured now, and a record with both. */
    SHOW_AT(c, hpml_distribute_predict(dist, NULL, &p, why, sizeof why) == HPML_OK && p.step_s > 0);
    SHOW_AT(c, hpml_distribute_json(dist, NULL, record, sizeof record) > 0 && strstr(record, "measured_by_predicted"));
    SHOW_AT(c, hpml_distribute_set_batch(dist, 4) == HPML_OK);              /* samples of a step, of both ranks */
    hpml_distribute_free(dist);                                             /* each rank goes on alone */
    hpml_trainer_step(t, cases, answers, 4, NULL);
    /* The same ranks as a group that ops use: the sum of their numbers, with its gradient. */
    const hpml_group *group = hpml_ctx_group(ctx, HPML_AXIS_TENSOR);
    SHOW_AT(c, group->size == 1);
    hpml_tensor *y = hpml_tensor_create_1d(ctx, 1);
    hpml_tensor_set(y, &one, 1);
    SHOW_AT(c, hpml_group_sum(y, HPML_AXIS_TENSOR) != NULL);
    return hpml_ctx_status(ctx);
}

int main(void)
{
    char             error[512];
    hpml_launch_desc d = { .ranks = 2, .ctx = { .seed = 1, .threads = 1 } };
    texts();
    roles();
    forecasts();
    if (hpml_launch(&d, train, NULL, error, sizeof error) != HPML_OK) return printf("%s\n", error), 1;
    return tour_wrong;
}
