/* What you learn: from a table to a model in one file, and back: split, columns standardized inside the model, early
   stopping with the best weights, your own metadata; then a model that takes raw numbers. Difficulty 1 of 4.
   cc -O2 examples/25_model_file.c -o model_file -lm -lpthread && ./model_file      trains, saves, loads, predicts
   ./model_file house.safetensors 120 35 2.5     predicts the price of a house from its file alone
   prints an epoch's losses a line, then the errors on houses that the training has not seen. */
#define HPML_IMPLEMENTATION
#include "../hpml.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { HOUSES = 2000, COLUMNS = 3 };
static float table[HOUSES][COLUMNS], price[HOUSES]; /* square metres, years, km to the centre; thousands of euros */

static void make_table(void)
{
    hpml_rng r = { .seed = 1 };
    for (int i = 0; i < HOUSES; i++) {
        float area = 40 + 160 * hpml_rng_uniform(&r), years = 80 * hpml_rng_uniform(&r), km = 20 * hpml_rng_uniform(&r);
        table[i][0] = area, table[i][1] = years, table[i][2] = km;
        price[i] = area * (4 - 0.15f * km) * (1 - 0.004f * years) + 10 * hpml_rng_normal(&r);
    }
}

static int show_epoch(const hpml_epoch *e, void *user)
{
    (void)user;
    if (e->epoch % 5 == 0)
        printf("epoch %2lld  loss %.4f  on other houses %.4f\n", (long long)e->epoch, e->loss, e->val_loss);
    return 0;
}

static hpml_status train(hpml_ctx *ctx, const char *path)
{
    /* A dataset in the program's own arrays: nothing is copied. */
    hpml_dataset all = { .ctx = ctx, .count = HOUSES, .x_dtype = HPML_DTYPE_F32, .x_ndim = 1, .x_shape = { COLUMNS },
                         .x = table, .y_dtype = HPML_DTYPE_F32, .y_size = 1, .y = price };
    hpml_dataset *known = NULL, *rest = NULL, *watched = NULL, *unseen = NULL;
    float         mean[COLUMNS], deviation[COLUMNS], price_mean[1], price_deviation[1];
    hpml_dataset_split(&all, 0.6, 1, &known, &rest);
    hpml_dataset_split(rest, 0.5, 2, &watched, &unseen);
    hpml_dataset_stats(known, HPML_STATS_COLUMNS, mean, deviation);
    hpml_dataset_stats(known, HPML_STATS_TARGETS, price_mean, price_deviation);

    hpml_linear_desc hidden = { .activation = HPML_ACT_RELU };
    hpml_tensor     *x = hpml_input_2d(ctx, 32, COLUMNS), *target = hpml_input_2d(ctx, 32, 1);
    hpml_tensor     *h = hpml_standardize(x, COLUMNS, mean, deviation, "columns");
    hpml_tensor     *y = hpml_linear(hpml_linear(h, 32, &hidden), 1, NULL);
    y = hpml_unstandardize(y, 1, price_mean, price_deviation, "price");
    float            unit = 1 / (price_deviation[0] * price_deviation[0]); /* the loss counts in deviations */
    hpml_trainer    *t    = hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = x, .output = y, .loss_tensor = hpml_scale(hpml_mse(y, target), unit, 0), .target = target,
        .optimizer = HPML_OPT_ADAM, .lr = 0.01f });
    hpml_trainer_fit(t, known, &(hpml_fit_desc){ .epochs = 60, .validation = watched, .patience = 8, .keep_best = true,
                                                 .on_epoch = show_epoch });

    float  *guess = (float *)malloc(sizeof(float) * HOUSES);
    double  error = 0;
    if (guess && hpml_trainer_predict_data(t, &all, guess) == HPML_OK)
        for (int i = 0; i < HOUSES; i++) error += fabs((double)guess[i] - (double)price[i]) / HOUSES;
    free(guess);
    hpml_metrics m = { .loss = 0 };
    if (hpml_trainer_evaluate(t, unseen, &m) == HPML_OK)
        printf("mean error %.1f thousand on all houses; loss %.4f on unseen ones\n", error, m.loss);
    const hpml_meta note = { "unit", "thousand euros" };
    return hpml_model_save(ctx, path, &(hpml_model_desc){ .outputs = &y, .output_count = 1, .meta = &note,
                                                          .meta_count = 1 });
}

static hpml_status predict(hpml_ctx *ctx, const char *path, const float *house)
{
    float       value[1];
    hpml_model *model  = hpml_model_load(ctx, path, 1); /* no code of the model: the file has its structure */
    hpml_status status = hpml_model_predict(model, house, 1, value);
    if (status == HPML_OK)
        printf("%.0f square metres, %.0f years, %.1f km: %.0f %s\n", (double)house[0], (double)house[1],
               (double)house[2], (double)value[0], hpml_model_meta(model, "unit"));
    return status;
}

int main(int argc, char **argv)
{
    const char *path  = argc > 1 ? argv[1] : "house.safetensors";
    float       house[COLUMNS] = { 120, 35, 2.5f };
    hpml_status status = HPML_OK;
    if ((argc > 2 && argc != 2 + COLUMNS) || path[0] == '-')
        return printf("usage: %s [FILE [SQUARE_METRES YEARS KM]]\n", argv[0]), 2;
    for (int i = 0; i < COLUMNS && argc == 2 + COLUMNS; i++) house[i] = strtof(argv[2 + i], NULL);
    for (int again = argc == 2 + COLUMNS; again < 2 && status == HPML_OK; again++) { /* train, then predict */
        hpml_ctx *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 1, .log = hpml_log_stderr });
        if (!again) make_table();
        status = again ? predict(ctx, path, house) : train(ctx, path);
        hpml_ctx_free(ctx);
    }
    return status != HPML_OK;
}
