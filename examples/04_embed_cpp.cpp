// What you learn: hpml inside a C++17 program that has its own arrays. Difficulty 2 of 4.
//   c++ -std=c++17 -O2 examples/04_embed_cpp.cpp -o embed -lm -lpthread && ./embed
// Three things an embedder wants: one matrix product, one small model, and 1-bit packing of a gradient buffer.
#define HPML_IMPLEMENTATION
#include "../hpml.h"
#include <cmath>
#include <cstdio>
#include <memory>
#include <vector>

using context = std::unique_ptr<hpml_ctx, decltype(&hpml_ctx_free)>;

static bool product(hpml_ctx *ctx)
{
    const int64_t      n = 64;
    std::vector<float> a(n * n, 0.5f), b(n * n, 2.0f), c(n * n);
    hpml_sgemm(ctx, false, true, n, n, n, 1, a.data(), n, b.data(), n, 0, c.data(), n);
    std::printf("product: %.1f, expected %.1f\n", c[0], double(n));
    return c[0] == float(n);
}

/* y = sin(3 x), learned from 256 points. */
static bool regression(hpml_ctx *ctx)
{
    std::vector<float> x(256), y(256);
    for (int i = 0; i < 256; i++) {
        x[i] = float(i) / 128 - 1;
        y[i] = std::sin(3 * x[i]);
    }
    hpml_linear_desc hidden  = {};
    hidden.activation        = HPML_ACT_TANH;
    hpml_trainer_desc desc   = {};
    desc.input               = hpml_input_2d(ctx, 256, 1);
    desc.output              = hpml_linear(hpml_linear(desc.input, 32, hidden), 1, nullptr);
    desc.loss                = HPML_LOSS_MSE;
    desc.optimizer           = HPML_OPT_ADAM;
    desc.lr                  = 0.01f;
    hpml_trainer  *trainer   = hpml_trainer_create(ctx, desc);
    hpml_step_info info      = {};
    for (int step = 0; step < 800; step++) hpml_trainer_step(trainer, x.data(), y.data(), 256, &info);
    std::printf("regression: mean squared error %.6f after %d steps\n", double(info.loss), int(info.step));
    return info.loss < 1e-3f && hpml_ctx_status(ctx) == HPML_OK;
}

/* A gradient of 128 x 784 goes out as 1 bit a number; what that loses is carried in the residual. */
static bool one_bit()
{
    hpml_codec_desc desc = {};
    desc.kind            = HPML_CODEC_ONEBIT;
    hpml_packing packing;
    if (hpml_packing_init(&packing, &desc, 128, 784) != HPML_OK) return false;
    std::vector<float>         gradient(128 * 784), residual(packing.residual_count), decoded(128 * 784);
    std::vector<unsigned char> wire(packing.size);
    for (size_t i = 0; i < gradient.size(); i++) gradient[i] = std::cos(float(i));
    hpml_packing_encode(&packing, wire.data(), residual.data(), gradient.data(), 128);
    hpml_packing_decode(&packing, decoded.data(), wire.data(), 128);
    double error = 0;
    for (size_t i = 0; i < gradient.size(); i++) error += std::fabs(double(gradient[i]) - decoded[i] - residual[i]);
    std::printf("1-bit: %zu bytes instead of %zu; decoded + residual - gradient: %g\n", wire.size(),
                gradient.size() * 4, error);
    return error < 1e-2;
}

int main()
{
    context ctx(hpml_ctx_create(nullptr), hpml_ctx_free);
    bool    good = product(ctx.get()) && regression(ctx.get()) && one_bit();
    if (!good) std::fprintf(stderr, "%s\n", hpml_ctx_error(ctx.get()));
    return good ? 0 : 1;
}
