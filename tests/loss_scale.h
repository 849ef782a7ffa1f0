/* A training whose gradients overflow f16 at the initial loss scale: the dynamic loss scale must decrease until they
   fit, and the training must learn. */
#ifndef HPML_LOSS_SCALE_H
#define HPML_LOSS_SCALE_H

/* Returns true if some steps are skipped, but less than half, and the others reduce the loss. */
static bool loss_scale_adapts(hpml_ctx *ctx)
{
    float          x[64], first = 0;
    const int32_t  y[4] = { 0, 1, 1, 0 };
    int            skipped = 0;
    hpml_step_info info = { 0 };
    hpml_tensor   *in  = hpml_input_2d(ctx, 4, 16);
    hpml_tensor   *out = hpml_scale(hpml_linear(hpml_tanh(hpml_linear(in, 8, NULL)), 2, NULL), 16, 0);
    hpml_trainer  *t   = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = in, .output = out, .lr = 0.002f });
    for (int i = 0; i < 64; i++) x[i] = (float)((i / 16 == 1 || i / 16 == 2 ? 3 : -3) + i % 5 - 2);
    for (int i = 0; i < 40; i++) {
        if (hpml_trainer_step(t, x, y, 4, &info) != HPML_OK) return false;
        skipped += info.skipped;
        if (i == 0) first = info.loss;
    }
    return skipped > 0 && skipped < 20 && info.step == 40 - skipped && info.loss < 0.2f * first;
}

#endif
