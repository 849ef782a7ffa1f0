/* What you learn: MNIST in 30 lines: train, validate, save, load, predict. Difficulty 1 of 4.
   cc -O2 -DHPML_USE_ZLIB examples/29_mnist.c -o mnist -lm -lpthread -lz && cd FOLDER && mnist
   FOLDER has MNIST's four files, gzipped.
   prints a line for each epoch, then: the first test digit is a 7; 98.0 % of the test digits are right
   writes mnist.safetensors, the model, and appends to mnist.jsonl, the log: a line of JSON for each step and epoch */
#define HPML_IMPLEMENTATION
#include "../hpml.h"
#include <stdio.h>

static int epoch(const hpml_epoch *e, void *user)
{
    (void)user;
    return printf("epoch %lld: loss %.4f, of the test digits %.4f\n", (long long)e->epoch, e->loss, e->val_loss) < 0;
}

int main(void)
{
    hpml_ctx     *ctx   = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 1, .log = hpml_log_stderr });
    hpml_dataset *train = hpml_dataset_load_idx(ctx, "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz");
    hpml_dataset *test  = hpml_dataset_load_idx(ctx, "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz");
    hpml_tensor  *x     = hpml_input_4d(ctx, 64, 1, 28, 28); /* (B, 1, 28, 28) */
    hpml_tensor  *y     = hpml_linear(hpml_relu(hpml_linear(hpml_flatten(x), 256, NULL)), 10, NULL); /* (B, 10) */
    hpml_trainer *t     = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = x, .output = y, .lr = 0.1f });
    hpml_trainer_fit(t, train, &(hpml_fit_desc){ .epochs = 20, .validation = test, .patience = 2, .keep_best = true,
                                                 .on_epoch = epoch, .log = "mnist.jsonl" });
    hpml_metrics  m     = { 0 };
    hpml_trainer_evaluate(t, test, &m);
    hpml_model_save(ctx, "mnist.safetensors", &(hpml_model_desc){ .output_count = 1, .outputs = &y });

    hpml_ctx   *other = hpml_ctx_create(&(hpml_ctx_desc){ .log = hpml_log_stderr }); /* or in another program */
    hpml_model *model = hpml_model_load(other, "mnist.safetensors", 1);
    float       image[784] = { 0 }, score[10] = { 0 };
    int         best = 0;
    for (int i = 0; test && i < 784; i++) image[i] = ((const uint8_t *)test->x)[i] / 255.0f;
    if (hpml_model_predict(model, image, 1, score) != HPML_OK) return 1; /* the log has said why */
    for (int i = 1; i < 10; i++) best = score[i] > score[best] ? i : best;
    printf("the first test digit is a %d; %.1f %% of the test digits are right\n", best, 100 * m.accuracy);
    hpml_ctx_free(other);
    hpml_ctx_free(ctx);
    return 0;
}
