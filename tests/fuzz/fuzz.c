/* The fuzz targets, see fuzz.h. For libFuzzer (-DFUZZ_BODY) this is the whole program, hpml.h's body included, and the
   environment's HPML_FUZZ_TARGET says which target it is; seeds.c runs the same targets on its seeds. Whatever is read
   lies in heap blocks of just its size, so that the sanitizers notice one byte too many. */
#define _GNU_SOURCE
#include "fuzz.h"

#include <fcntl.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static char path[2][32]; /* two files, whose content is the input */
static int  fd[2];

#ifdef FUZZ_BODY
#include <stdarg.h>
static const uint8_t *bytes_of[2]; /* the content where it stays in memory, which is faster by far; NULL: in the file */
static size_t         size_of[2];
static int            opened;      /* which of the two was opened last */

enum { HEAP = 1000 }; /* descriptors from here on are memory, not files */

static int heap_open(const char *name, int flags, ...)
{
    for (int i = 0; i < 2; i++)
        if (strcmp(name, path[i]) == 0 && bytes_of[i]) return HEAP + (opened = i);
    return open(name, flags, 0600);
}

static int heap_stat(int from, struct stat *is)
{
    if (from < HEAP) return fstat(from, is);
    memset(is, 0, sizeof *is);
    is->st_mode = S_IFREG, is->st_size = (off_t)size_of[from - HEAP];
    return 0;
}

static FILE *heap_stream(int from, const char *mode)
{
    if (from < HEAP) return fdopen(from, mode);
    return fmemopen((void *)(uintptr_t)bytes_of[from - HEAP], size_of[from - HEAP], mode);
}

static int heap_close(int from) { return from < HEAP ? close(from) : 0; }

static void *heap_map(size_t size)
{
    void *p = malloc(size);
    return p ? memcpy(p, bytes_of[opened], size) : MAP_FAILED;
}

#define open                              heap_open
#define fstat(from, is)                   heap_stat(from, is)
#define fdopen                            heap_stream
#define close                             heap_close
#define mmap(at, size, may, how, from, o) heap_map(size)
#define munmap(p, size)                   free(p)
#define HPML_IMPLEMENTATION
#endif
#include "../../hpml.h"
#ifdef HPML_USE_ZLIB
#include <zlib.h>
#endif

const char *const fuzz_names[FUZZ_TARGETS] = { "idx", "gzip", "cifar", "csv", "text", "npy", "records", "safetensors",
                                               "checkpoint", "params", "npz", "tar" };

static hpml_ctx         *ctx;
static hpml_trainer     *trainer; /* whose checkpoints are fuzzed */
static volatile uint64_t sink;
static bool              in_file; /* zlib opens a file by its name */

static void *exact_alloc(size_t size, size_t align, void *user)
{
    void *p;
    (void)user;
    return posix_memalign(&p, align, size) == 0 ? p : NULL;
}

static void exact_free(void *p, size_t size, void *user)
{
    (void)size, (void)user;
    free(p);
}

static void promise(bool kept, const char *what)
{
    if (kept) return;
    fprintf(stderr, "broken promise: %s\n", what);
    abort();
}

static void clean_up(void)
{
    for (int i = 0; i < 2; i++) remove(path[i]);
    hpml_ctx_free(ctx);
}

static void begin(void)
{
    hpml_ctx_desc d = { .threads = 1, .allocator = { exact_alloc, exact_free, NULL } };
    ctx = hpml_ctx_create(&d);
    for (int i = 0; i < 2; i++) {
        strcpy(path[i], access("/dev/shm", W_OK) == 0 ? "/dev/shm/hpml_XXXXXX" : "/tmp/hpml_XXXXXX");
        fd[i] = mkstemp(path[i]);
    }
    hpml_tensor *x = hpml_input_2d(ctx, 2, 3), *h = hpml_linear(x, 2, &(hpml_linear_desc){ .name = "fc" });
    trainer = hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = x, .output = hpml_linear(hpml_batchnorm(h, &(hpml_norm_desc){ .name = "bn" }), 2, NULL),
        .optimizer = HPML_OPT_ADAM });
    promise(trainer && fd[0] >= 0 && fd[1] >= 0, "there are a trainer and two files");
    atexit(clean_up);
}

static const char *content(int i, const uint8_t *bytes, size_t size)
{
#ifdef FUZZ_BODY
    bytes_of[i] = in_file ? NULL : bytes, size_of[i] = size;
    if (!in_file) return path[i];
#endif
    promise(ftruncate(fd[i], 0) == 0 && pwrite(fd[i], bytes, size, 0) == (ssize_t)size, "files can be written");
    return path[i];
}

static void read_bytes(const void *bytes, size_t size)
{
    for (size_t i = 0; i < size; i++) sink += ((const unsigned char *)bytes)[i];
}

/* Reads a whole dataset directly, then through a loader. */
static void use(hpml_dataset *d)
{
    promise((d != NULL) == (hpml_ctx_status(ctx) == HPML_OK), "a dataset or an error");
    if (!d) return;
    int64_t each = 1;
    for (int i = 0; i < d->x_ndim; i++) each *= d->x_shape[i];
    int64_t step = d->x_step ? d->x_step : each, y_step = d->y_step ? d->y_step : d->y_size;
    size_t  size = (size_t)((d->count - 1) * step + each) * hpml_dtype_size(d->x_dtype);
    read_bytes(d->x, size);
    if (d->y) read_bytes(d->y, (size_t)((d->count - 1) * y_step + d->y_size) * 4);
    const int32_t *label = (const int32_t *)d->y;
    for (int64_t i = 0; label && d->y_dtype == HPML_DTYPE_I32 && i < (d->count - 1) * y_step + d->y_size; i++)
        promise(d->classes > 0 || label[i] < 0 || label[i] == INT32_MAX, "labels have classes");
    bool             image = d->x_ndim == 3 && d->x_dtype != HPML_DTYPE_I32;
    hpml_loader_desc with  = { .batch = 3, .no_prefetch = true, .augment = { .shift = image, .flip = image } };
    hpml_loader     *l     = size < 1 << 16 ? hpml_loader_create(ctx, d, &with) : NULL;
    hpml_batch       b;
    for (int i = 0; i < 3 && hpml_loader_next(l, &b); i++) sink += (uint64_t)b.samples;
    hpml_loader_free(l);
    hpml_dataset_free(d);
}

#ifdef HPML_USE_ZLIB
/* The bytes, compressed; cut short or with a wrong checksum where `harm` says so. */
static const char *packed(int i, const uint8_t *bytes, size_t size, int harm)
{
    uint8_t *out = (uint8_t *)malloc(size + 512);
    z_stream z;
    memset(&z, 0, sizeof z);
    deflateInit2(&z, 1, Z_DEFLATED, 31, 8, 0);
    z.next_in = (Bytef *)(uintptr_t)bytes, z.avail_in = (unsigned)size;
    z.next_out = out, z.avail_out = (unsigned)size + 512;
    deflate(&z, Z_FINISH);
    size_t n = z.total_out;
    deflateEnd(&z);
    if (harm & 1 && n > 9) n -= 9;
    if (harm & 2 && n > 4) out[n - 3] ^= 1;
    content(i, out, n);
    free(out);
    return path[i];
}
#endif

static void records(const char *from)
{
    hpml_records_file *f = hpml_records_open(ctx, from);
    for (int64_t i = -1; i <= hpml_records_count(f); i++) {
        size_t      size;
        const void *bytes = hpml_records_get(f, i, &size);
        read_bytes(bytes, size);
    }
    hpml_records_close(f);
    hpml_ctx_clear_error(ctx);
    use(hpml_dataset_load_records(ctx, from));
}

static void safetensors(const char *from)
{
    hpml_safetensors *f = hpml_safetensors_open(ctx, from);
    hpml_safetensor   e, same;
    for (int i = 0; hpml_safetensors_at(f, i, &e); i++) {
        int64_t count = 1;
        for (int k = 0; k < e.ndim; k++) count *= e.shape[k];
        read_bytes(e.name, strlen(e.name));
        read_bytes(e.data, e.bytes);
        promise((size_t)count * hpml_dtype_size(e.dtype) == e.bytes, "an entry has the bytes of its shape");
        promise(hpml_safetensors_find(f, e.name, &same) && same.data == e.data, "an entry is found by its name");
    }
    const char *meta = hpml_safetensors_meta(f, "hpml.step");
    if (meta) read_bytes(meta, strlen(meta));
    hpml_safetensors_close(f);
}

static bool finite_parameters(void)
{
    for (int i = 0; i < hpml_param_count(ctx); i++) {
        const hpml_tensor *p = hpml_param_at(ctx, i);
        for (int64_t k = 0; k < hpml_tensor_count(p); k++)
            if (!isfinite(p->data[k])) return false;
    }
    return true;
}

/* Loads parameters or a checkpoint: completely or not at all; then trains a step, or checks the error. */
static void load(const char *from, bool training)
{
    static const float   x[6] = { 1, 2, 3, 4, 5, 6 };
    static const int32_t y[2] = { 0, 1 };
    uint64_t    before = hpml_param_hash(ctx);
    hpml_status status = training ? hpml_checkpoint_load(trainer, from) : hpml_params_load(ctx, from);
    hpml_ctx_clear_error(ctx);
    promise(status == HPML_OK || before == hpml_param_hash(ctx), "all is loaded or nothing");
    promise(finite_parameters(), "parameters are finite");
    if (status != HPML_OK || !training) return;
    int64_t step = hpml_trainer_step_count(trainer);
    status = hpml_trainer_step(trainer, x, y, 2, NULL);
    promise(status != HPML_OK || hpml_trainer_step_count(trainer) == step + 1, "a step is counted");
    hpml_ctx_clear_error(ctx);
    hpml_dataset *d = hpml_dataset_create(ctx, 2, HPML_DTYPE_F32, 1, (int64_t[]){ 3 }, x, HPML_DTYPE_I32, 1, y);
    hpml_trainer_fit(trainer, d, &(hpml_fit_desc){ .max_steps = 2 });
    hpml_ctx_clear_error(ctx);
    hpml_dataset_free(d);
    for (int i = 0; i < hpml_param_count(ctx); i++) { /* an update may overflow; the next input begins anew */
        hpml_tensor *p = hpml_param_at(ctx, i);
        for (int64_t k = 0; k < hpml_tensor_count(p); k++)
            if (!isfinite(p->data[k])) p->data[k] = 1;
    }
}

void fuzz_one(int target, const uint8_t *p, size_t n)
{
    const char *both[2] = { path[0], path[1] };
    size_t      cut;
    in_file = target == FUZZ_GZIP;
    if (!ctx) begin();
    if (n < 3) return;
    switch (target) {
    case FUZZ_IDX: /* two bytes say where the labels begin; of gzip a third how both are packed */
    case FUZZ_GZIP:
        cut = (size_t)p[0] << 8 | p[1];
        if (cut > n - 3) cut = n - 3;
        content(0, p + 3, cut), content(1, p + 3 + cut, n - 3 - cut);
#ifdef HPML_USE_ZLIB
        if (target == FUZZ_GZIP && p[2] & 1) packed(0, p + 3, cut, p[2] >> 2);
        if (target == FUZZ_GZIP && p[2] & 2) packed(1, p + 3 + cut, n - 3 - cut, p[2] >> 2);
#endif
        use(hpml_dataset_load_idx(ctx, path[0], path[1]));
        break;
    case FUZZ_CIFAR: /* a byte says how many records the first of two files has */
        cut = p[0] % 3 * (size_t)3073;
        if (cut > n - 1) cut = n - 1;
        content(0, p + 1, cut), content(1, p + 1 + cut, n - 1 - cut);
        use(hpml_dataset_load_cifar10(ctx, cut ? both : both + 1, cut ? 2 : 1));
        break;
    case FUZZ_CSV: /* a byte for the label's column, one for what it is */
        content(0, p + 2, n - 2);
        use(hpml_dataset_load_csv(ctx, path[0], p[0] == 100 ? HPML_NO_LABEL : (int8_t)p[0] % 8, p[1] & 1));
        break;
    case FUZZ_TEXT: /* a byte for the context, one for the length of the first of two files */
        cut = p[1] % 64;
        if (cut > n - 2) cut = n - 2;
        content(0, p + 2, cut), content(1, p + 2 + cut, n - 2 - cut);
        use(hpml_dataset_load_text(ctx, both, 2, p[0] % 32, p[0] & 1));
        hpml_ctx_clear_error(ctx);
        use(hpml_dataset_load_text(ctx, both + 1, 1, p[0] % 32, p[0] & 1));
        break;
    case FUZZ_NPY:
    case FUZZ_NPZ: {
        const char  *file = content(0, p, n);
        hpml_tensor *t    = target == FUZZ_NPY ? hpml_npy_load(ctx, file) : hpml_npz_load(ctx, file, "x");
        promise((t != NULL) == (hpml_ctx_status(ctx) == HPML_OK), "a tensor or an error");
        if (t) read_bytes(t->raw, (size_t)hpml_tensor_count(t) * hpml_dtype_size(t->dtype));
        hpml_tensor_free(t);
        break;
    }
    case FUZZ_TAR:
        content(0, p, n);
        use(hpml_dataset_load_tar(ctx, both, 1, "npy", "cls"));
        hpml_ctx_clear_error(ctx);
        use(hpml_dataset_load_tar(ctx, both, 1, "bin", n % 2 ? NULL : "y.npy"));
        break;
    case FUZZ_RECORDS: records(content(0, p, n)); break;
    case FUZZ_SAFETENSORS: safetensors(content(0, p, n)); break;
    default: load(content(0, p, n), target == FUZZ_CHECKPOINT);
    }
    hpml_ctx_clear_error(ctx);
}

#ifdef FUZZ_BODY
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    static int target = -1;
    while (target < 0 || strcmp(fuzz_names[target], getenv("HPML_FUZZ_TARGET")) != 0) target++;
    fuzz_one(target, bytes, size);
    return 0;
}
#endif
