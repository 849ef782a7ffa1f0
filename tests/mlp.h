/* A task for tests of training: digits drawn by digits.h, or those in MNIST's t10k files in the folder HPML_MNIST, the
   last 2,000 for testing; and an MLP of 784-128-10. */
#include "../examples/digits.h"

enum { TESTED = 2000, HIDDEN = 128 };

static int            to_learn; /* number of training digits; TESTED digits for testing follow */
static unsigned char *images;
static int32_t       *labels;

/* Fills images and labels, with `drawn` training digits if there are no files. */
static void get_digits(int drawn)
{
    const char   *folder = getenv("HPML_MNIST");
    hpml_ctx     *ctx    = hpml_ctx_create(NULL);
    hpml_dataset *all    = NULL;
    char          path[2][1024];
    if (images) return;
    for (int gz = 0; folder && gz < 2 && !all; gz++) {
        hpml_ctx_clear_error(ctx);
        snprintf(path[0], sizeof path[0], "%s/t10k-images-idx3-ubyte%s", folder, gz ? ".gz" : "");
        snprintf(path[1], sizeof path[1], "%s/t10k-labels-idx1-ubyte%s", folder, gz ? ".gz" : "");
        all = hpml_dataset_load_idx(ctx, path[0], path[1]);
    }
    if (folder && !all) { printf("    %s\n", hpml_ctx_error(ctx)); exit(1); }
    to_learn = all ? (int)all->count - TESTED : drawn;
    int count = to_learn + TESTED;
    images    = (unsigned char *)malloc((size_t)count * 785);
    labels    = (int32_t *)malloc((size_t)count * sizeof *labels);
    if (all) {
        memcpy(images, all->x, (size_t)count * 784);
        memcpy(labels, all->y, (size_t)count * sizeof *labels);
    } else {
        digits_fill(1, 0, to_learn, images, images + count * 784);
        digits_fill(1, 1000000000, TESTED, images + to_learn * 784, images + count * 784 + to_learn);
        for (int i = 0; i < count; i++) labels[i] = images[count * 784 + i];
    }
    hpml_ctx_free(ctx);
}

/* Makes a data set of `count` digits from digit `first` on. */
static hpml_dataset *digits(hpml_ctx *ctx, int first, int count)
{
    static const int64_t shape[1] = { 784 };
    return hpml_dataset_create(ctx, count, HPML_DTYPE_U8, 1, shape, images + (int64_t)first * 784,
                               HPML_DTYPE_I32, 1, labels + first);
}

static hpml_tensor *mlp(hpml_tensor *x)
{
    const hpml_linear_desc relu = { .activation = HPML_ACT_RELU };
    return hpml_linear(hpml_linear(x, HIDDEN, &relu), 10, NULL);
}
