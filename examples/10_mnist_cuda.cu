/* What you learn: the digit classifier of 02_mnist.c on a GPU: only the creation of the context changes.
   Difficulty 2 of 4.
   nvcc -O2 -arch=native examples/10_mnist_cuda.cu -lcublasLt -lcudnn -o mnist_cuda
   ./mnist_cuda [--precision f32|tf32|bf16|f16] [--cpu] [--data DIR] [--model M] [--epochs N] [--batch N] [--lr X]
                [--seed N] [--json]
   prints each epoch with accuracy and speed, then the counts of hpml_cuda_text; --cpu trains on the CPU. */
#define HPML_IMPLEMENTATION
#include "../hpml_cuda.cuh"
#include "mnist_options.h"

static hpml_tensor *convolution(hpml_tensor *x, int64_t channels)
{
    hpml_conv2d_desc d = {};
    d.kernel_h   = 5;
    d.padding_h  = 2;
    d.activation = HPML_ACT_RELU;
    return hpml_max_pool2d(hpml_conv2d(x, channels, &d), 2, 0, 0);
}

static hpml_tensor *record_model(const char *kind, hpml_tensor *x) /* (B, 1, 28, 28) -> (B, 10) */
{
    hpml_linear_desc relu = {};
    relu.activation = HPML_ACT_RELU;
    if (strcmp(kind, "linear") == 0) return hpml_linear(hpml_flatten(x), 10, NULL);
    if (strcmp(kind, "mlp") == 0) return hpml_linear(hpml_linear(hpml_flatten(x), 128, &relu), 10, NULL);
    x = convolution(convolution(x, 16), 32); /* (B, 32, 7, 7) */
    return hpml_linear(hpml_linear(hpml_flatten(x), 128, &relu), 10, NULL);
}

static int train(hpml_ctx *ctx, const options *o, const char *where)
{
    hpml_dataset     *data = NULL, *test = NULL;
    char              ran[1024];
    hpml_metrics      m = {};
    hpml_trainer_desc d = {};
    if (!load_data(ctx, o, &data, &test)) return 1;
    d.input    = hpml_input_4d(ctx, o->batch, 1, 28, 28);
    d.output   = record_model(o->model, d.input);
    d.lr       = (float)o->lr;
    d.momentum = 0.9f;
    d.schedule.kind        = HPML_SCHEDULE_COSINE;
    d.schedule.total_steps = o->epochs * ((data->count + o->batch - 1) / o->batch);
    hpml_trainer *t = hpml_trainer_create(ctx, &d);
    printf("%s, %lld parameters, %lld training digits, batch %lld, %s\n", o->model, (long long)hpml_param_total(ctx),
           (long long)data->count, (long long)o->batch, where);
    double seconds = 0;
    for (int64_t e = 0; e < o->epochs; e++) {
        double start = hpml_now();
        if (hpml_trainer_fit(t, data, NULL) != HPML_OK) return 1;
        seconds += hpml_now() - start;
        if (hpml_trainer_evaluate(t, test, &m) != HPML_OK) return 1;
        printf("pass %lld: loss %.4f, accuracy %.2f %%, %.0f samples/s\n", (long long)e + 1, m.loss, 100 * m.accuracy,
               (double)(data->count * (e + 1)) / seconds);
    }
    if (hpml_cuda_text(ctx, ran, sizeof ran) > 0) printf("%s\n", ran);
    if (o->save && hpml_checkpoint_save(t, o->save) != HPML_OK) return 1;
    if (o->json)
        printf("{\"test_accuracy\": %.4f, \"train_seconds\": %.3f, \"samples_per_second\": %.0f, \"parameters\": %lld, "
               "\"weights_hash\": \"%016llx\"}\n", m.accuracy, seconds, (double)(data->count * o->epochs) / seconds,
               (long long)hpml_param_total(ctx), (unsigned long long)hpml_param_hash(ctx));
    return 0;
}

int main(int argc, char **argv)
{
    options        o    = {};
    hpml_cuda_desc gpu  = {};
    hpml_cuda_info info = {};
    hpml_ctx_desc  desc = {};
    int            cpu  = 0;
    static const char *const names[] = { "f32", "tf32", "bf16", "f16" };
    const char              *precision = "f32";
    const option             extra[] = {
        { "--precision", OPTION_CHOICE, &precision, "f32|tf32|bf16|f16", "how the GPU computes (f32)" },
        { "--cpu", OPTION_FLAG, &cpu, NULL, "trains the same model on the CPU, to compare" } };
    o.model = "cnn", o.codec = "none", o.allreduce = "auto", o.transport = "threads";
    o.samples = 12000, o.batch = 64, o.workers = 1, o.seed = 1;
    int failed = parse(&o, extra, 2, argc, argv), p = 0;
    if (failed) return failed == 1 ? 0 : failed;
    while (strcmp(names[p], precision) != 0) p++;
    gpu.precision = (hpml_cuda_precision)p;
    desc.seed = (uint64_t)o.seed;
    if (!cpu) desc.backend = hpml_backend_cuda(), desc.backend_desc = &gpu;
    hpml_cuda_device_info(0, &info);
    hpml_ctx *ctx = hpml_ctx_create(&desc);
    failed = hpml_ctx_status(ctx) != HPML_OK || train(ctx, &o, cpu ? "on the CPU" : info.name);
    if (hpml_ctx_status(ctx) != HPML_OK) fprintf(stderr, "error: %s\n", hpml_ctx_error(ctx)), failed = 1;
    hpml_ctx_free(ctx);
    return failed;
}
