/* Memory that is taken late, and shards: what each rank keeps of the optimizer's state, of gradients and of values, the
   bits of training, the elements moved, the bytes held, checkpoints and refusals. */
#include "../hpml_comm.h"
#include "test.h"
#include "toy_points.h"

enum { BATCH = 6, WIDE = 24, MOST = 4 };

/* Records an MLP with a normalization and returns its trainer. */
static hpml_trainer *model(hpml_ctx *ctx, const hpml_trainer_desc *settings, hpml_tensor **input)
{
    const hpml_linear_desc relu = { .activation = HPML_ACT_RELU };
    hpml_trainer_desc      d = *settings;
    d.input  = hpml_input_2d(ctx, BATCH, INPUTS);
    d.output = d.input;
    for (int l = 0; l < 3; l++) d.output = hpml_linear(d.output, WIDE + l, &relu);
    d.output = hpml_linear(hpml_layernorm(d.output, NULL), CLASSES, NULL);
    if (input) *input = d.input;
    return hpml_trainer_create(ctx, &d);
}

// ---------------------------------------------------------------------------------------------------------------------
// memory that is taken late
// ---------------------------------------------------------------------------------------------------------------------
/* Trains for two epochs, with memory taken late or not; returns the hash of the parameters. */
static uint64_t train_serially(bool late, hpml_memory *planned, size_t *before, size_t *after)
{
    const hpml_trainer_desc settings = { .optimizer = HPML_OPT_ADAMW, .weight_decay = 0.01f, .clip_norm = 1 };
    hpml_ctx *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 3, .threads = 1 });
    hpml_ctx_defer(ctx, late);
    hpml_trainer *t = model(ctx, &settings, NULL);
    *before = hpml_ctx_bytes(ctx);
    hpml_graph_memory(hpml_trainer_graph(t), planned);
    ENSURE(hpml_trainer_alloc(t) == HPML_OK);
    *after = hpml_ctx_bytes(ctx);
    hpml_trainer_fit(t, points(ctx, 50, 0, 0, 0), &(hpml_fit_desc){ .epochs = 2 });
    uint64_t hash = hpml_param_hash(ctx);
    ENSURE(hpml_ctx_status(ctx) == HPML_OK);
    hpml_ctx_free(ctx);
    return hash;
}

TEST(memory_taken_late_trains_to_the_same_bits)
{
    hpml_memory planned[2];
    size_t      before[2], after[2];
    uint64_t    hash[2];
    for (int late = 0; late < 2; late++) hash[late] = train_serially(late, &planned[late], &before[late], &after[late]);
    ENSURE(hash[0] == hash[1]);
    ENSURE(memcmp(&planned[0], &planned[1], sizeof planned[0]) == 0);
    ENSURE(before[0] == after[0] && after[0] == after[1]);
    ENSURE(after[1] - before[1] >= planned[1].total && after[1] - before[1] < planned[1].total + 8192);
}

/* Each of the calls that need memory takes the memory that hpml_trainer_create has left for later. */
TEST(each_use_of_a_trainer_takes_its_memory)
{
    for (int use = 0; use < 7; use++) {
        float     x[BATCH * INPUTS] = { 0 }, out[BATCH * CLASSES];
        int32_t   y[BATCH] = { 0 };
        hpml_ctx *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 3, .threads = 1 });
        hpml_ctx_defer(ctx, true);
        hpml_tensor  *input;
        hpml_trainer *t = model(ctx, &(hpml_trainer_desc){ 0 }, &input);
        hpml_metrics  metrics = { 0 };
        ENSURE(t && !input->data && hpml_trainer_place(t, 0) == 0 && hpml_trainer_place(t, 1) > 0);
        switch (use) {
        case 0: hpml_trainer_step(t, x, y, BATCH, NULL); break;
        case 1: hpml_trainer_evaluate(t, points(ctx, 5, 0, 0, 0), &metrics); break;
        case 2: hpml_trainer_predict(t, x, BATCH, out); break;
        case 3: hpml_checkpoint_save(t, "build/shard_late.safetensors"); break;
        case 4: hpml_checkpoint_load(t, "build/shard_late.safetensors"); break;
        case 5: ENSURE(hpml_trainer_array(t, HPML_ARRAY_GRADIENTS, NULL) != NULL); break;
        case 6: hpml_trainer_apply_range(t, 0, 1, 1); break;
        }
        ENSURE(hpml_ctx_status(ctx) == HPML_OK && input->data != NULL);
        hpml_ctx_free(ctx);
    }
    remove("build/shard_late.safetensors");
}

