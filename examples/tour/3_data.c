/* A tour of data: files that are read, loaders that make batches, records, files of tensors. Difficulty 2 of 4.
   cc -O2 examples/tour/3_data.c -o data -lm -lpthread && mkdir -p build && ./data
   prints the conditions that hold, and WRONG before one that does not; exits with 1 then. Writes files to build/. */
#define HPML_IMPLEMENTATION
#include "../../hpml.h"
#include "tour.h"
#include <math.h>
#include <string.h>

#define CSV     "build/tour.csv"
#define IMAGES  "build/tour.bin"
#define RECORDS "build/tour.records"
#define TENSORS "build/tour.safetensors"

static bool write_file(const char *path, const void *bytes, size_t size)
{
    FILE *f = fopen(path, "wb");
    return f && fwrite(bytes, 1, size, f) == size && fclose(f) == 0;
}

/* A table with a header; its second column is the label. */
static void tables(hpml_ctx *ctx)
{
    const char    text[] = "height,kind,width\n1.5,0,2\n2.5,1,4\n3.5,1,6\n0.5,0,8\n";
    float         mean[2], deviation[2];
    hpml_dataset *a = NULL, *b = NULL;
    write_file(CSV, text, sizeof text - 1);
    hpml_dataset *d = hpml_dataset_load_csv(ctx, CSV, 1, false);
    SHOW(d && d->count == 4 && d->x_shape[0] == 2 && d->classes == 2);
    SHOW(hpml_dataset_stats(d, HPML_STATS_COLUMNS, mean, deviation) == 2 && mean[0] == 2 && mean[1] == 5);
    SHOW(hpml_dataset_split(d, 0.25, 1, &a, &b) == HPML_OK && a->count == 1 && b->count == 3);
    /* A model that takes raw numbers, and gives them in their own units. */
    hpml_tensor    *x = hpml_input_2d(ctx, 4, 2), *z = hpml_standardize(x, 2, mean, deviation, "in");
    hpml_tensor    *y = hpml_unstandardize(z, 2, mean, deviation, "out");
    hpml_graph_desc g = { .output_count = 1, .outputs = &y };
    float           back[8];
    hpml_graph     *graph = hpml_graph_create(ctx, &g);
    hpml_graph_alloc(graph);
    hpml_tensor_set(x, (const float *)d->x, 8);
    hpml_graph_forward(graph, false, 0);
    hpml_tensor_get(y, back, 8);
    SHOW(fabsf(back[0] - 1.5f) < 1e-6f && fabsf(back[7] - 8) < 1e-6f);
    hpml_dataset_free(b);
}

/* CIFAR-10's format: a byte for the label, 3 x 32 x 32 bytes for the image. */
static void images(hpml_ctx *ctx)
{
    static unsigned char file[2 * 3073];
    const char          *paths[1] = { IMAGES };
    file[0] = 3;
    file[3073] = 9;
    file[3074] = 255;
    write_file(IMAGES, file, sizeof file);
    hpml_dataset *d = hpml_dataset_load_cifar10(ctx, paths, 1);
    SHOW(d && d->count == 2 && d->x_dtype == HPML_DTYPE_U8 && d->classes == 10);
    SHOW(d && ((const int32_t *)d->y)[1] == 9 && ((const unsigned char *)d->x)[3072] == 255);
}

/* A loader shuffles, cuts into batches, and may begin anywhere. */
static void batches(hpml_ctx *ctx)
{
    const int64_t shape[1] = { 1 };
    float         x[10], first[4];
    int           seen[10] = { 0 };
    hpml_batch    batch;
    for (int i = 0; i < 10; i++) x[i] = (float)i;
    hpml_dataset *d = hpml_dataset_create(ctx, 10, HPML_DTYPE_F32, 1, shape, x, HPML_DTYPE_F32, 0, NULL);
    hpml_loader  *l = hpml_loader_create(ctx, d, &(hpml_loader_desc){ .batch = 4 });
    SHOW(hpml_loader_steps(l) == 3);
    for (int i = 0; i < 3 && hpml_loader_next(l, &batch); i++) {
        for (int64_t k = 0; k < batch.samples; k++) seen[(int)((const float *)batch.x)[k]]++;
        if (i == 1) memcpy(first, batch.x, sizeof first);
    }
    SHOW(batch.samples == 2 && seen[0] == 1 && seen[9] == 1);   /* each sample once, the last batch is short */
    SHOW(!hpml_loader_next(l, &batch));                         /* the end of the epoch */
    SHOW(hpml_loader_seek(l, 0, 1) == HPML_OK && hpml_loader_next(l, &batch) && memcmp(first, batch.x, 16) == 0);
    hpml_loader_free(l);
}

/* Records: many small byte strings in one file, found by number. A dataset can be saved as records. */
static void records(hpml_ctx *ctx)
{
    const int64_t        shape[1] = { 1 };
    const float          x[2] = { 5, 6 };
    const int32_t        y[2] = { 1, 0 };
    size_t               size = 0;
    hpml_records_writer *w = hpml_records_create(ctx, RECORDS);
    hpml_records_add(w, "one", 3);
    hpml_records_add(w, "", 0);
    hpml_records_add(w, "three", 5);
    SHOW(hpml_records_finish(w) == HPML_OK);
    hpml_records_file *f = hpml_records_open(ctx, RECORDS);
    SHOW(hpml_records_count(f) == 3 && memcmp(hpml_records_get(f, 2, &size), "three", 5) == 0 && size == 5);
    hpml_records_close(f);
    w = hpml_records_create(ctx, RECORDS);
    hpml_records_abandon(w); /* the file stays as it was */
    SHOW(hpml_records_count(hpml_records_open(ctx, RECORDS)) == 3);
    hpml_dataset *d = hpml_dataset_create(ctx, 2, HPML_DTYPE_F32, 1, shape, x, HPML_DTYPE_I32, 1, y);
    hpml_dataset_save_records(d, RECORDS);
    d = hpml_dataset_load_records(ctx, RECORDS);
    SHOW(d && d->count == 2 && ((const float *)d->x)[1] == 6 && ((const int32_t *)d->y)[0] == 1);
}

/* Files of named tensors, which Python's safetensors reads and writes. */
static void files(hpml_ctx *ctx)
{
    const float     values[2] = { 1, 2 };
    hpml_safetensor out  = { "bias", HPML_DTYPE_F32, 1, { 2 }, values, sizeof values }, in;
    const hpml_meta meta = { "author", "you" };
    SHOW(hpml_safetensors_save(ctx, TENSORS, &out, 1, &meta, 1) == HPML_OK);
    hpml_safetensors *f = hpml_safetensors_open(ctx, TENSORS);
    SHOW(hpml_safetensors_count(f) == 1 && strcmp(hpml_safetensors_meta(f, "author"), "you") == 0);
    SHOW(hpml_safetensors_at(f, 0, &in) && strcmp(in.name, "bias") == 0 && ((const float *)in.data)[1] == 2);
    SHOW(!hpml_safetensors_at(f, 1, &in));
}

/* Archives: numpy's .npz files, and tar files in which members of equal names up to the first dot are a sample. */
static void archives(hpml_ctx *ctx)
{
    const char *paths[1] = { "build/none.tar" };
    SHOW(hpml_npz_load(ctx, "build/none.npz", "x") == NULL && hpml_ctx_status(ctx) == HPML_ERR_OPEN);
    hpml_ctx_clear_error(ctx);
    SHOW(hpml_dataset_load_tar(ctx, paths, 1, "npy", "cls") == NULL && hpml_ctx_status(ctx) == HPML_ERR_OPEN);
    hpml_ctx_clear_error(ctx);
}

int main(void)
{
    hpml_ctx *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 7, .threads = 1 });
    tables(ctx);
    images(ctx);
    batches(ctx);
    records(ctx);
    files(ctx);
    archives(ctx);
    return tour_end(ctx);
}
