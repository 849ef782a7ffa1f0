/* What you learn: the shortest whole program. Difficulty 1 of 4.
   cc -O2 examples/01_xor.c -o xor -lm -lpthread && ./xor
   prints: loss 0.00.., accuracy 1.00 */
#define HPML_IMPLEMENTATION
#include "../hpml.h"
#include <stdio.h>

int main(void)
{
    const float    x[8] = { 0, 0, 0, 1, 1, 0, 1, 1 }; /* (4, 2) */
    const int32_t  y[4] = { 0, 1, 1, 0 };             /* (4) */
    hpml_ctx      *ctx  = hpml_ctx_create(NULL);
    hpml_tensor   *in   = hpml_input_2d(ctx, 4, 2);
    hpml_tensor   *out  = hpml_linear(hpml_tanh(hpml_linear(in, 8, NULL)), 2, NULL);
    hpml_trainer  *t    = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = in, .output = out, .lr = 0.5f });
    hpml_step_info info = { 0 };

    for (int step = 0; step < 500; step++) hpml_trainer_step(t, x, y, 4, &info);
    printf("loss %.4f, accuracy %.2f\n", (double)info.loss, (double)info.accuracy);
    if (hpml_ctx_status(ctx) != HPML_OK) fprintf(stderr, "%s\n", hpml_ctx_error(ctx));
    hpml_ctx_free(ctx);
    return 0;
}
