// What you learn: hpml inside a C++17 program that has its own arrays. Difficulty 2 of 4.
//   c++ -std=c++17 -O2 examples/04_embed_cpp.cpp -o embed -lm -lpthread && ./embed
// Four uses of the library from C++: a matrix product, the rest of BLAS, a small model, 1-bit packing of gradients.
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

/* A matrix times a vector, vectors, the largest magnitude; and a product of halves, whose sums are f32. */
static bool vectors(hpml_ctx *ctx)
{
    std::vector<float>    a = { 1, 2, 3, 4, 5, 6 }, x = { 1, 0, -1 }, y(2), c(4); /* a (2, 3) */
    std::vector<uint16_t> half(a.size());
    hpml_sgemv(ctx, false, 2, 3, 1, a.data(), 3, x.data(), 1, 0, y.data(), 1); /* -2 -2 */
    hpml_saxpy(ctx, 2, 0.5f, a.data(), 3, y.data(), 1);                        /* and half of a's first column */
    hpml_sscal(ctx, 2, 2, y.data(), 1);
    hpml_convert(ctx, HPML_DTYPE_BF16, half.data(), HPML_DTYPE_F32, a.data(), 6);
    hpml_gemm(ctx, false, true, 2, 2, 3, 1, HPML_DTYPE_BF16, half.data(), 3, HPML_DTYPE_BF16, half.data(), 3, 0,
              c.data(), 2);
    int64_t largest = hpml_isamax(ctx, 4, c.data(), 1);
    std::printf("vectors: %.1f %.1f, expected -3.0 0.0; a a^T: largest %.1f, expected 77.0\n", y[0], y[1], c[largest]);
    return y[0] == -3 && y[1] == 0 && c[largest] == 77;
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
    hpml_packing_encode(&packing, wire.data(), residual.data(), gradient.data(), 128, NULL);
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
    bool    good = product(ctx.get()) && vectors(ctx.get()) && regression(ctx.get()) && one_bit();
    if (!good) std::fprintf(stderr, "%s\n", hpml_ctx_error(ctx.get()));
    return good ? 0 : 1;
}
