/* llm.c's training of GPT-2 124M, T 256, batch 1, for bench_models.py: answers each line of its input with a line of
   pairs, "params 124439808 llm.c 0.2": samples/s. Compiled by bench_models.sh with -I to llm.c's source. */
#include <stdio.h>
#define TESTING
#define printf(...) ((void)0) /* llm.c prints sizes */
#include "train_gpt2.c"
#undef printf

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int main(void)
{
    enum { T = 256 };
    static GPT2 model;
    static int  tokens[T], labels[T];
    double      turn  = getenv("TURN") ? atof(getenv("TURN")) : 1, start;
    int         steps = 1;
    size_t      padding;
    model.config = (GPT2Config){ .max_seq_len = 1024, .vocab_size = 50257, .padded_vocab_size = 50304, .num_layers = 12,
                                 .num_heads = 12, .channels = 768 };
    fill_in_parameter_sizes(model.param_sizes, model.config);
    for (int i = 0; i < NUM_PARAMETER_TENSORS; i++) model.num_parameters += model.param_sizes[i];
    model.params_memory = malloc_and_point_parameters(&model.params, model.param_sizes);
    for (size_t i = 0; i < model.num_parameters; i++) model.params_memory[i] = 0.001f * (float)(i * 37 % 41) - 0.02f;
    padding = (size_t)(model.config.padded_vocab_size - model.config.vocab_size) * 768;
    for (int i = 0; i < T; i++) tokens[i] = i * 7919 % 50257;
    for (int line = getchar(); line != EOF; line = getchar()) {
        if (line != '\n') continue;
        int before = steps;
        start = now();
        while (steps == 1 || steps == before || now() - start < turn) {
            gpt2_forward(&model, tokens, labels, 1, T);
            gpt2_zero_grad(&model);
            gpt2_backward(&model);
            gpt2_update(&model, 1e-4f, 0.9f, 0.999f, 1e-8f, 0.1f, steps);
            if (steps++ == 1) start = now(), before = steps; /* the first step warms up */
        }
        printf("params %zu llm.c %.6g\n", model.num_parameters - padding, (steps - before) / (now() - start));
        fflush(stdout);
    }
    return 0;
}
