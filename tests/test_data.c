/* Files: every reader against good, cut, wrong and random files; round trips; whole-or-nothing writing; the loader. */
#include "meter.h"
#include "files.h"
#include "npz_files.h"
#include "test.h"
#include <fcntl.h>
#include <float.h>
#include <locale.h>
#include <signal.h>
#include <sys/wait.h>

static const unsigned char images[16 + 2 * 6] = { 0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 3,
                                                  1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 255 };
static const unsigned char labels[8 + 2] = { 0, 0, 8, 1, 0, 0, 0, 2, 4, 9 };

static hpml_dataset *two_images(hpml_ctx *ctx)
{
    return hpml_dataset_load_idx(ctx, put("i", images, sizeof images), put("l", labels, sizeof labels));
}

TEST(idx)
{
    hpml_ctx     *ctx = hpml_ctx_create(NULL);
    hpml_dataset *d = two_images(ctx);
    ENSURE(d && d->count == 2 && d->x_shape[1] == 2 && d->x_shape[2] == 3 && d->classes == 10);
    ENSURE(((const unsigned char *)d->x)[11] == 255 && ((const int32_t *)d->y)[1] == 9);
    ENSURE(hpml_dataset_load_idx(ctx, file("i"), file("missing")) == NULL && hpml_ctx_status(ctx) == HPML_ERR_OPEN);
    hpml_ctx_clear_error(ctx);
    ENSURE(hpml_dataset_load_idx(ctx, file("l"), file("i")) == NULL && hpml_ctx_status(ctx) == HPML_ERR_FORMAT);
    hpml_ctx_free(ctx);
}

TEST(idx_names_the_dimension)
{
    static const struct { int at; unsigned char to; const char *says; } wrong[] = {
        { 15, 0, "dimension 3 of 3 is 0, expected 1 or more" },
        { 7, 0, "dimension 1 of 3 is 0, expected 1 or more" },
        { 7, 3, "promises 18 bytes of data, the file has 12" } };
    unsigned char bytes[sizeof images];
    hpml_ctx     *ctx = hpml_ctx_create(NULL);
    for (int i = 0; i < 4; i++) {
        memcpy(bytes, images, sizeof bytes);
        if (i < 3) bytes[wrong[i].at] = wrong[i].to;
        else memset(bytes + 4, 255, 12);
        ENSURE_ERROR(ctx, !hpml_dataset_load_idx(ctx, put("d", bytes, sizeof bytes), put("l", labels, sizeof labels)),
                     HPML_ERR_FORMAT, i < 3 ? wrong[i].says : "dimension 2 of 3 is 4294967295, expected");
    }
    hpml_ctx_free(ctx);
}

/* images, gzipped */
static const unsigned char packed[] = {
    31, 139, 8, 0, 0, 0, 0, 0, 2, 255, 99, 96, 224, 96, 102, 96, 96, 96, 130, 98, 102, 70, 38, 102, 22,
    86, 54, 118, 14, 78, 46, 238, 255, 0, 238, 178, 184, 160, 28, 0, 0, 0 };

TEST(gzipped_idx)
{
    hpml_ctx     *ctx = hpml_ctx_create(NULL);
    hpml_dataset *d   = hpml_dataset_load_idx(ctx, put("z", packed, sizeof packed), put("l", labels, sizeof labels));
#ifdef HPML_USE_ZLIB
    ENSURE(d && d->count == 2 && memcmp(d->x, images + 16, 12) == 0);
    d = hpml_dataset_load_idx(ctx, put("z", packed, sizeof packed - 9), file("l"));
    ENSURE_ERROR(ctx, !d, HPML_ERR_FORMAT, "damaged gzip file");
#else
    ENSURE_ERROR(ctx, !d, HPML_ERR_UNSUPPORTED, "is gzipped");
#endif
    hpml_ctx_free(ctx);
}

TEST(cifar)
{
    static unsigned char r[2 * 3073];
    const char          *paths[2];
    hpml_ctx            *ctx = hpml_ctx_create(NULL);
    hpml_dataset        *d;
    r[0] = 7, r[3073] = 9, r[3074] = 42;
    paths[0] = put("c", r, sizeof r), paths[1] = paths[0];
    d = hpml_dataset_load_cifar10(ctx, paths, 2);
    ENSURE(d && d->count == 4 && ((const int32_t *)d->y)[2] == 7 && ((const unsigned char *)d->x)[3072] == 42);
    r[3073] = 10;
    put("c", r, sizeof r);
    ENSURE(hpml_dataset_load_cifar10(ctx, paths, 1) == NULL && hpml_ctx_status(ctx) == HPML_ERR_LABEL);
    hpml_ctx_clear_error(ctx);
    put("c", r, 3000);
    ENSURE(hpml_dataset_load_cifar10(ctx, paths, 1) == NULL && hpml_ctx_status(ctx) == HPML_ERR_FORMAT);
    hpml_ctx_free(ctx);
}

static hpml_dataset *csv(hpml_ctx *ctx, const char *text, int32_t label, bool regression)
{
    return hpml_dataset_load_csv(ctx, put("csv", text, strlen(text)), label, regression);
}

TEST(csv_files)
{
    hpml_ctx     *ctx = hpml_ctx_create(NULL);
    hpml_dataset *d = csv(ctx, "a,b,label\n1.5,-2e3,0\r\n\"3\", 4 ,2\n\n5,6,1", -1, false);
    ENSURE(d && d->count == 3 && d->x_shape[0] == 2 && d->classes == 3);
    ENSURE(((const float *)d->x)[1] == -2000.0f && ((const float *)d->x)[2] == 3 && ((const int32_t *)d->y)[2] == 1);
    d = csv(ctx, ",year,\"y\"\n1,2,0\n", -1, false);
    ENSURE(d && d->count == 1 && ((const float *)d->x)[1] == 2);
    d = csv(ctx, "1;2;3\n4;5;6.25\n", 2, true);
    ENSURE(d && d->count == 2 && ((const float *)d->y)[1] == 6.25f);
    d = csv(ctx, "1\t2\n3\t4\n", HPML_NO_LABEL, false);
    ENSURE(d && d->x_shape[0] == 2 && d->y_size == 0);
    ENSURE(csv(ctx, "1,2\n3\n", -1, false) == NULL && strstr(hpml_ctx_error(ctx), "line 2"));
    hpml_ctx_clear_error(ctx);
    ENSURE(csv(ctx, "1,2\n3,x\n", -1, false) == NULL && hpml_ctx_status(ctx) == HPML_ERR_FORMAT);
    hpml_ctx_clear_error(ctx);
    ENSURE(csv(ctx, "1,2\n3,2.5\n", -1, false) == NULL && hpml_ctx_status(ctx) == HPML_ERR_LABEL);
    hpml_ctx_clear_error(ctx);
    ENSURE(csv(ctx, "1,2\n3.4028236e38,3\n", -1, true) == NULL); /* more than f32 holds */
    hpml_ctx_clear_error(ctx);
    d = csv(ctx, "3.40282347e38,-3.4028235e38\n", -1, true); /* as %.9g and %.8g write the largest */
    ENSURE(d && ((const float *)d->x)[0] == FLT_MAX && ((const float *)d->y)[0] == -FLT_MAX);
    d = csv(ctx, "\xEF\xBB\xBF" "1,2\n3,4\n", -1, true); /* a byte order mark is no header */
    ENSURE(d && d->count == 2);
    ENSURE(csv(ctx, "1,2\n3,nan\n", -1, true) == NULL);
    hpml_ctx_clear_error(ctx);
    ENSURE(csv(ctx, "1,2\n", 5, true) == NULL);
    hpml_ctx_clear_error(ctx);
    ENSURE(csv(ctx, "5.1,3.5,setosa\n4.9,3.0,virginica\n", -1, false) == NULL &&
           strstr(hpml_ctx_error(ctx), "line 1, column 3: \"setosa\" is not a number; a header has none"));
    hpml_ctx_free(ctx);
}

TEST(text)
{
    hpml_ctx     *ctx = hpml_ctx_create(NULL);
    const char   *path = put("t", "abcabd", 6);
    hpml_dataset *d = hpml_dataset_load_text(ctx, &path, 1, 3, false);
    int           V;
    const unsigned char *v = hpml_dataset_vocabulary(d, &V);
    ENSURE(d && d->count == 3 && V == 4 && v[3] == 'd' && ((const int32_t *)d->y)[4] == 3);
    ENSURE(hpml_dataset_load_text(ctx, &path, 1, 6, true) == NULL && hpml_ctx_status(ctx) == HPML_ERR_FORMAT);
    hpml_ctx_clear_error(ctx);
    ENSURE(hpml_dataset_load_text(ctx, &path, 1, 0, true) == NULL && hpml_ctx_status(ctx) == HPML_ERR_ARGUMENT);
    hpml_ctx_clear_error(ctx);
    ENSURE(hpml_dataset_load_cifar10(ctx, NULL, 0) == NULL && hpml_ctx_status(ctx) == HPML_ERR_ARGUMENT);
    hpml_ctx_clear_error(ctx);
    const int64_t huge = (INT64_C(1) << 62) + 1;
    ENSURE(hpml_dataset_create(ctx, 2, HPML_DTYPE_U8, 0, NULL, path, HPML_DTYPE_I32, huge, path) == NULL);
    ENSURE(hpml_ctx_status(ctx) == HPML_ERR_OVERFLOW);
    hpml_ctx_free(ctx);
}

TEST(npy_and_records)
{
    hpml_ctx           *ctx = hpml_ctx_create(NULL);
    hpml_tensor        *t = hpml_tensor_create_3d(ctx, 2, 3, 5), *u;
    hpml_records_writer *w;
    hpml_records_file   *f;
    size_t              size;
    hpml_dataset       *d;
    for (int i = 0; i < 30; i++) t->data[i] = (float)i / 7;
    ENSURE(hpml_npy_save(t, file("a.npy")) == HPML_OK);
    u = hpml_npy_load(ctx, file("a.npy"));
    ENSURE(u && u->ndim == 3 && u->shape[2] == 5 && memcmp(u->data, t->data, 120) == 0);
    ENSURE(hpml_npy_save(t, "/nonexistent/x.npy") == HPML_ERR_WRITE);
    hpml_ctx_clear_error(ctx);
    w = hpml_records_create(ctx, file("r"));
    ENSURE(hpml_records_add(w, "one", 3) == HPML_OK && hpml_records_add(w, "", 0) == HPML_OK &&
           hpml_records_add(w, "three", 5) == HPML_OK);
    ENSURE(access(file("r"), F_OK) != 0); /* not there before it is whole */
    ENSURE(hpml_records_finish(w) == HPML_OK);
    f = hpml_records_open(ctx, file("r"));
    ENSURE(hpml_records_count(f) == 3 && memcmp(hpml_records_get(f, 2, &size), "three", 5) == 0 && size == 5);
    ENSURE(hpml_records_get(f, 3, &size) == NULL);
    d = two_images(ctx);
    ENSURE(hpml_dataset_save_records(d, file("d")) == HPML_OK);
    d = hpml_dataset_load_records(ctx, file("d"));
    ENSURE(d && d->count == 2 && memcmp(d->x, images + 16, 12) == 0 && ((const int32_t *)d->y)[0] == 4);
    hpml_ctx_free(ctx);
}

static hpml_trainer *small_trainer(hpml_ctx *ctx)
{
    hpml_tensor *x = hpml_input_2d(ctx, 4, 3), *y = hpml_linear(x, 2, &(hpml_linear_desc){ .name = "fc" });
    return hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = x, .output = y, .momentum = 0.9f });
}

/* A finite number that would be infinite in the file is an error with the names of both; the old file stays. */
TEST(numbers_beyond_the_halves_are_not_saved)
{
    static const struct { hpml_dtype dtype; float fits, beyond; } halves[] = {
        { HPML_DTYPE_F16, 65519.996f, -65520 }, { HPML_DTYPE_BF16, 3.3961773e38f, 3.3961777e38f } };
    char before[4096], after[4096];
    for (int h = 0; h < 2; h++) {
        hpml_ctx    *ctx = hpml_ctx_create(NULL);
        hpml_tensor *w = hpml_param_create(ctx, &(hpml_param_desc){ .name = "first", .ndim = 1, .shape = { 3 } });
        w = hpml_param_create(ctx, &(hpml_param_desc){ .name = "the.second", .ndim = 2, .shape = { 300, 1000 } });
        hpml_param_init(ctx);
        w->data[250123] = halves[h].fits;
        ENSURE(hpml_params_save(ctx, file("h"), halves[h].dtype) == HPML_OK);
        FILE  *f = fopen(file("h"), "rb");
        size_t n = fread(before, 1, sizeof before, f);
        fclose(f);
        w->data[250123] = halves[h].beyond;
        w->data[250124] = NAN; /* not hidden by one */
        ENSURE(hpml_params_save(ctx, file("h"), halves[h].dtype) == HPML_ERR_NONFINITE);
        ENSURE(strstr(hpml_ctx_error(ctx), "element 250123 of \"the.second\""));
        f = fopen(file("h"), "rb");
        ENSURE(fread(after, 1, sizeof after, f) == n && memcmp(before, after, n) == 0);
        fclose(f);
        ENSURE(!fopen(file("h.tmp"), "rb"));
        hpml_ctx_clear_error(ctx);
        ENSURE(hpml_params_save(ctx, file("h"), HPML_DTYPE_F32) == HPML_OK);
        hpml_ctx_free(ctx);
    }
}

TEST(safetensors_and_parameters)
{
    hpml_ctx         *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .seed = UINT64_C(1) << 63 });
    hpml_ctx         *other = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 9 });
    hpml_trainer     *t = small_trainer(ctx), *o = small_trainer(other);
    hpml_safetensors *f;
    hpml_safetensor   e;
    ENSURE(t && o && hpml_param_hash(ctx) != hpml_param_hash(other));
    ENSURE(hpml_params_save(ctx, file("p"), HPML_DTYPE_F32) == HPML_OK &&
           hpml_params_load(other, file("p")) == HPML_OK);
    ENSURE(hpml_param_hash(ctx) == hpml_param_hash(other));
    ENSURE(hpml_params_save(ctx, file("h"), HPML_DTYPE_BF16) == HPML_OK &&
           hpml_params_load(other, file("h")) == HPML_OK);
    ENSURE_NEAR(hpml_param_at(ctx, 0)->data[3], hpml_param_at(other, 0)->data[3], 0.01);
    f = hpml_safetensors_open(ctx, file("p"));
    ENSURE(f && hpml_safetensors_count(f) == 2 && hpml_safetensors_find(f, "fc.weight", &e) &&
           e.shape[0] == 2 && e.shape[1] == 3);
    ENSURE(!hpml_safetensors_find(f, "fc", &e));
    hpml_safetensors_close(f);
    ENSURE(hpml_checkpoint_load(t, file("p")) == HPML_ERR_FORMAT); /* no training in it */
    hpml_ctx_clear_error(ctx);
    ENSURE(hpml_checkpoint_save(t, file("k")) == HPML_OK && hpml_checkpoint_load(o, file("k")) == HPML_OK);
    ENSURE(hpml_ctx_seed(other) == UINT64_C(1) << 63);
    ENSURE(hpml_params_save(ctx, "/nonexistent/p", HPML_DTYPE_F32) == HPML_ERR_WRITE);
    hpml_ctx_clear_error(ctx);
    e = (hpml_safetensor){ "x", HPML_DTYPE_F32, 1, { 3 }, "twelve bytes", 11 };
    ENSURE(hpml_safetensors_save(ctx, file("w"), &e, 1, NULL, 0) == HPML_ERR_ARGUMENT && access(file("w"), F_OK) != 0);
    hpml_ctx_free(other);
    hpml_ctx_free(ctx);
}

static const char *npy(const char *name, const char *dict, const void *data, size_t size)
{
    unsigned char b[256] = "\x93NUMPY\1\0\x56"; /* 10 + 86 bytes of header */
    memset(b + 10, ' ', 86);
    memcpy(b + 10, dict, strlen(dict));
    memcpy(b + 96, data, size);
    return put(name, b, 96 + size);
}

TEST(other_numpy_types)
{
    hpml_ctx     *ctx = hpml_ctx_create(NULL);
    const double  x[3] = { 1.5, -INFINITY, FLT_MAX }, large[2] = { 0, -1e300 };
    const int64_t i[3] = { 7, INT32_MAX, INT32_MIN }, huge[2] = { 1, (int64_t)INT32_MAX + 1 };
    hpml_tensor  *t;
    t = hpml_npy_load(ctx, npy("d.npy", "{'descr': '<f8', 'fortran_order': False, 'shape': (3,), }", x, sizeof x));
    ENSURE(t && t->dtype == HPML_DTYPE_F32 && t->data[0] == 1.5f && t->data[1] == -INFINITY && t->data[2] == FLT_MAX);
    t = hpml_npy_load(ctx, npy("d.npy", "{'descr': '<f8', 'fortran_order': False, 'shape': (2,), }", large, 16));
    ENSURE_ERROR(ctx, !t, HPML_ERR_FORMAT, "element 1 is -1e+300, more than f32 holds");
    t = hpml_npy_load(ctx, npy("q.npy", "{'descr': '<i8', 'fortran_order': False, 'shape': (1, 3), }", i, sizeof i));
    ENSURE(t && t->dtype == HPML_DTYPE_I32 && t->ndim == 2);
    const int32_t *v = (const int32_t *)t->raw;
    ENSURE(v[0] == 7 && v[1] == INT32_MAX && v[2] == INT32_MIN);
    t = hpml_npy_load(ctx, npy("q.npy", "{'descr': '<i8', 'fortran_order': False, 'shape': (2,), }", huge, 16));
    ENSURE_ERROR(ctx, !t, HPML_ERR_FORMAT, "element 1 is 2147483648, more than i32 holds");
    t = hpml_npy_load(ctx, npy("q.npy", "{'descr': '<i8', 'fortran_order': True, 'shape': (1, 3), }", i, sizeof i));
    ENSURE_ERROR(ctx, !t, HPML_ERR_FORMAT, "'fortran_order': True");
    t = hpml_npy_load(ctx, npy("q.npy", "{'descr': '<i8', 'fortran_order': False, 'shape': (55340232221128654851,), }",
                               i, sizeof i));
    ENSURE_ERROR(ctx, !t, HPML_ERR_FORMAT, "at most 5 dimensions"); /* 3 + 3 * 2^64 */
    t = hpml_npy_load(ctx, npy("q.npy", "{'descr': '<f8', 'fortran_order': False, 'shape': (), }", x, sizeof x[0]));
    ENSURE(t && t->ndim == 0 && t->data[0] == 1.5f && hpml_npy_save(t, file("0.npy")) == HPML_OK &&
           hpml_npy_load(ctx, file("0.npy")));
    t = hpml_tensor_create(ctx, HPML_DTYPE_BF16, 1, (int64_t[]){ 3 });
    ENSURE_ERROR(ctx, hpml_npy_save(t, file("b.npy")), HPML_ERR_UNSUPPORTED, "numpy has no bf16");
    hpml_ctx_free(ctx);
}

TEST(names_and_metadata_of_any_text)
{
    const char      odd[] = "a \"quoted\\ name\"\n\tof two lines";
    hpml_ctx       *ctx = hpml_ctx_create(NULL);
    float           x[3] = { 1, 2, 3 };
    hpml_meta       meta[2] = { { "k", odd }, { odd, "v" } };
    hpml_safetensor e = { odd, HPML_DTYPE_F32, 1, { 3 }, x, sizeof x };
    ENSURE(hpml_safetensors_save(ctx, file("odd"), &e, 1, meta, 2) == HPML_OK);
    hpml_safetensors *f = hpml_safetensors_open(ctx, file("odd"));
    ENSURE(f && hpml_safetensors_find(f, odd, &e) && memcmp(e.data, x, sizeof x) == 0);
    ENSURE(strcmp(hpml_safetensors_meta(f, "k"), odd) == 0 && strcmp(hpml_safetensors_meta(f, odd), "v") == 0);
    ENSURE(hpml_safetensors_meta(f, "none") == NULL);
    hpml_safetensors_close(f);
    put("odd", "\x13\0\0\0\0\0\0\0{\"__metadata__\":{\"\\u", 27);
    ENSURE_ERROR(ctx, !hpml_safetensors_open(ctx, file("odd")), HPML_ERR_FORMAT, "not a whole safetensors file");
    hpml_ctx_free(ctx);
}

/* Characters that JSON writes as codes; other writers have more of those. Two tensors of one name, or one with the
   metadata's name, would make a file that no reader accepts. */
TEST(names_with_codes)
{
    static const char *const names[] = { "a\nb", "a\tb\rc", "\b\f\x01\x1f", "\"\\/", "\xc3\xa9\x7f" };
    static const char other[] =
        "{\"\\u00e9\\u20AC\\ud83d\\ude00\\n\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}";
    static const char *const wrong[] = { "\\u00g0", "\\u12", "\\u0000", "\\ud83d", "\\ud83dabcdef", "\\x41", "\\" };
    hpml_ctx       *ctx = hpml_ctx_create(NULL);
    float           v[2] = { 1, 2 };
    hpml_safetensor t[5], e;
    char            text[300] = "";
    for (int i = 0; i < 5; i++) t[i] = (hpml_safetensor){ names[i], HPML_DTYPE_F32, 1, { 2 }, v, 8 };
    ENSURE(hpml_safetensors_save(ctx, file("codes"), t, 5, &(hpml_meta){ names[2], names[0] }, 1) == HPML_OK);
    hpml_safetensors *f = hpml_safetensors_open(ctx, file("codes"));
    for (int i = 0; i < 5; i++) ENSURE(hpml_safetensors_find(f, names[i], &e) && e.bytes == 8);
    ENSURE(strcmp(hpml_safetensors_meta(f, names[2]), names[0]) == 0);
    text[0] = (char)(sizeof other - 1);
    memcpy(text + 8, other, sizeof other);
    f = hpml_safetensors_open(ctx, put("other", text, 8 + sizeof other));
    ENSURE(hpml_safetensors_find(f, "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\n", &e));
    for (int i = 0; i < 7; i++) {
        int n = snprintf(text + 8, sizeof text - 8,
                         "{\"%s\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", wrong[i]);
        text[0] = (char)n;
        ENSURE_ERROR(ctx, !hpml_safetensors_open(ctx, put("other", text, (size_t)n + 9)), HPML_ERR_FORMAT,
                     "not a whole safetensors");
    }
    for (int i = 0; i < 3; i++) { /* what cannot be read is left out, as PyTorch's batch counters; not what is wrong */
        int n = snprintf(text + 8, sizeof text - 8,
                         "{\"a\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[0,8]},"
                         "\"b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[8,9]},"
                         "\"c\":{\"dtype\":\"F32\",\"shape\":[%d],\"data_offsets\":[%d,8]}}", i == 2, i == 1 ? 7 : 8);
        text[0] = (char)n;
        f = hpml_safetensors_open(ctx, put("other", text, (size_t)n + 17));
        if (i == 0)
            ENSURE(f && hpml_safetensors_count(f) == 1 && hpml_safetensors_find(f, "b", &e) &&
                   !hpml_safetensors_find(f, "a", &e));
        else ENSURE_ERROR(ctx, !f, HPML_ERR_FORMAT, "not a whole safetensors");
    }
    int n = snprintf(text + 8, sizeof text - 8, "{\"deep\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,2],"
                     "\"data_offsets\":[0,8]},\"b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[8,9]}}");
    text[0] = (char)n;
    f = hpml_safetensors_open(ctx, put("other", text, (size_t)n + 17));
    ENSURE(f && hpml_safetensors_count(f) == 1 && hpml_safetensors_find(f, "b", &e));
    ENSURE(!hpml_safetensors_find(f, "deep", &e)); /* more dimensions than there can be */
    hpml_ctx *deep = hpml_ctx_create(NULL);
    hpml_param_create(deep, &(hpml_param_desc){ .ndim = 5, .shape = { 1, 1, 1, 1, 2 }, .name = "deep" });
    ENSURE_ERROR(deep, hpml_params_load(deep, file("other")), HPML_ERR_FORMAT,
                 "no tensor \"deep\", which this model has");
    hpml_ctx_free(deep);
    t[1].name = t[4].name;
    ENSURE_ERROR(ctx, hpml_safetensors_save(ctx, file("none"), t, 5, NULL, 0), HPML_ERR_ARGUMENT,
                 "the name is used twice");
    ENSURE_ERROR(ctx, hpml_safetensors_save(ctx, file("none"), NULL, 1, NULL, 0), HPML_ERR_ARGUMENT, "1 tensors");
    ENSURE_ERROR(ctx, hpml_safetensors_save(ctx, file("none"), NULL, 0, NULL, 3), HPML_ERR_ARGUMENT, "3 pairs");
    ENSURE_ERROR(ctx, hpml_safetensors_save(ctx, file("none"), t, -1, NULL, 0), HPML_ERR_ARGUMENT, "-1 tensors");
    t[1].name = "__metadata__";
    ENSURE_ERROR(ctx, hpml_safetensors_save(ctx, file("none"), t, 5, NULL, 0), HPML_ERR_ARGUMENT,
                 "\"__metadata__\": the format");
    ENSURE_ERROR(ctx, hpml_safetensors_save(ctx, file("none"), t, 0, &(hpml_meta){ "k", NULL }, 1),
                 HPML_ERR_ARGUMENT, "metadata 0 needs");
    ENSURE_ERROR(ctx, !hpml_dataset_create(ctx, 2, HPML_DTYPE_F32, 1, NULL, v, HPML_DTYPE_I32, 0, NULL),
                 HPML_ERR_ARGUMENT, "a shape of positive sizes");
    ENSURE(access(file("none"), F_OK) != 0);
    hpml_param_create(ctx, &(hpml_param_desc){ .ndim = 1, .shape = { 3 }, .name = "__metadata__" });
    ENSURE_ERROR(ctx, hpml_params_save(ctx, file("none"), HPML_DTYPE_F32), HPML_ERR_ARGUMENT, "give it another name");
    hpml_ctx_free(ctx);
}

/* Records that are not finished leave no file, and hold none open. */
TEST(unfinished_records)
{
    int first = dup(0), next;
    close(first);
    for (int abandon = 0; abandon < 2; abandon++) {
        hpml_ctx           *ctx = hpml_ctx_create(NULL);
        hpml_records_writer *w   = hpml_records_create(ctx, file("unfinished"));
        ENSURE(w && hpml_records_add(w, "abc", 3) == HPML_OK);
        if (abandon) hpml_records_abandon(w);
        hpml_ctx_free(ctx);
        ENSURE(files_like("unfinished*") == 0);
    }
    next = dup(0);
    close(next);
    ENSURE(next == first);
}

TEST(files_and_datasets_refuse)
{
    hpml_ctx           *ctx = hpml_ctx_create(NULL);
    hpml_dataset       *d   = two_images(ctx);
    unsigned char       one[9] = { 0, 0, 8, 1, 0, 0, 0, 1, 4 };
    hpml_records_writer *w = hpml_records_create(ctx, file("gone"));
    hpml_trainer       *t = small_trainer(ctx);
    ENSURE(hpml_records_add(w, "one", 3) == HPML_OK);
    hpml_records_abandon(w);
    ENSURE(access(file("gone"), F_OK) != 0);
    ENSURE_ERROR(ctx, !hpml_dataset_slice(d, 1, 2), HPML_ERR_SHAPE, "2 samples from 1 on of 2");
    ENSURE_ERROR(ctx, !hpml_dataset_create(ctx, 0, HPML_DTYPE_U8, 0, NULL, one, HPML_DTYPE_I32, 0, NULL),
                 HPML_ERR_ARGUMENT, "got 0 samples");
    ENSURE_ERROR(ctx, !hpml_dataset_load_idx(ctx, file("i"), put("one", one, sizeof one)),
                 HPML_ERR_FORMAT, "holds 2 images");
    ENSURE_ERROR(ctx, !csv(ctx, "1,2\n\"3,4\n", -1, false), HPML_ERR_FORMAT, "line 2, column 1: \"\"3,4\" is not");
    ENSURE_ERROR(ctx, !csv(ctx, "1,,0\n3,4,1\n", -1, false), HPML_ERR_FORMAT, "line 1, column 2: \"\" is not a number");
    ENSURE_ERROR(ctx, !csv(ctx, "1e99,2,0\n3,4,1\n", -1, false), HPML_ERR_FORMAT, "\"1e99\" is not within what f32");
    ENSURE_ERROR(ctx, hpml_params_save(ctx, file("p"), HPML_DTYPE_I32), HPML_ERR_DTYPE, "f32, bf16 or f16");
    ENSURE_ERROR(ctx, !hpml_dataset_load_idx(ctx, NULL, NULL), HPML_ERR_ARGUMENT, "no file name given");
    ENSURE(hpml_params_save(ctx, file("p"), HPML_DTYPE_F32) == HPML_OK &&
           hpml_checkpoint_save(t, file("k")) == HPML_OK);
    hpml_ctx    *other = hpml_ctx_create(NULL);
    hpml_tensor *x = hpml_input_2d(other, 4, 3);
    hpml_tensor *y = hpml_linear(x, 2, &(hpml_linear_desc){ .name = "fc", .no_bias = true });
    hpml_trainer *adam = hpml_trainer_create(other, &(hpml_trainer_desc){
        .input = x, .output = y, .optimizer = HPML_OPT_ADAM, .accumulate = 2 });
    const float   ones[12] = { 1 };
    const int32_t zeros[4] = { 0 };
    ENSURE(hpml_params_load(other, file("p")) == HPML_OK); /* what else the file holds does not matter */
    ENSURE_ERROR(other, hpml_checkpoint_load(adam, file("k")), HPML_ERR_FORMAT,
                 "was written by optimizer \"sgd\", this trainer's is \"adam\"");
    ENSURE(hpml_trainer_step(adam, ones, zeros, 4, NULL) == HPML_OK);
    ENSURE_ERROR(other, hpml_checkpoint_save(adam, file("k")), HPML_ERR_STATE, "1 of 2 micro-batches of an update");
    hpml_linear(x, 2, &(hpml_linear_desc){ .name = "more" });
    ENSURE_ERROR(other, hpml_params_load(other, file("p")), HPML_ERR_FORMAT, "no tensor \"more.weight\"");
    hpml_ctx_free(other);
    hpml_ctx_free(ctx);
}

/* A child that saves all the time is killed at any moment: the file is always whole, and the next save leaves nothing
   beside it. */
TEST(killed_while_saving)
{
    for (int round = 0; round < 12; round++) {
        pid_t child = fork();
        hpml_ctx *ctx = hpml_ctx_create(NULL);
        hpml_trainer *t = small_trainer(ctx);
        if (child == 0)
            for (;;) hpml_checkpoint_save(t, file("k"));
        usleep(3000 + 1777 * (unsigned)round);
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        if (access(file("k"), F_OK) == 0) ENSURE(hpml_checkpoint_load(t, file("k")) == HPML_OK);
        if (round % 3 == 2) ENSURE(hpml_checkpoint_save(t, file("k")) == HPML_OK && files_like("k*") == 1);
        hpml_ctx_free(ctx);
    }
}

/* What stands at path.tmp, a long wreck, another writer or a folder, neither harms a save nor is harmed by it. */
TEST(temporary_files)
{
    static char         junk[100000];
    hpml_ctx           *ctx = hpml_ctx_create(NULL), *other = hpml_ctx_create(NULL);
    hpml_trainer       *t = small_trainer(ctx);
    hpml_records_writer *w;
    hpml_records_file   *f;
    put("s.tmp", junk, sizeof junk);
    ENSURE(hpml_checkpoint_save(t, file("s")) == HPML_OK &&
           hpml_checkpoint_load(t, file("s")) == HPML_OK && files_like("s*") == 1);
    w = hpml_records_create(other, file("s"));
    ENSURE(w && files_like("s*") == 2 && hpml_records_add(w, junk, 5) == HPML_OK);
    ENSURE(hpml_checkpoint_save(t, file("s")) == HPML_OK &&
           hpml_checkpoint_load(t, file("s")) == HPML_OK && files_like("s*") == 2);
    ENSURE(hpml_records_finish(w) == HPML_OK && files_like("s*") == 1);
    f = hpml_records_open(other, file("s"));
    ENSURE(f && hpml_records_count(f) == 1);
    ENSURE(mkdir(file("s.tmp"), 0700) == 0);
    ENSURE(hpml_checkpoint_save(t, file("s")) == HPML_OK &&
           hpml_checkpoint_load(t, file("s")) == HPML_OK && files_like("s*") == 2);
    hpml_ctx_free(other);
    hpml_ctx_free(ctx);
}

/* A pipe, as a device, is written to and not replaced. */
TEST(a_pipe_stays_one)
{
    char        text[4096] = "";
    struct stat is;
    hpml_ctx   *ctx = hpml_ctx_create(NULL);
    ENSURE(mkfifo(file("fifo"), 0600) == 0);
    int fd = open(file("fifo"), O_RDWR | O_NONBLOCK);
    ENSURE(fd >= 0 && hpml_trace_start(ctx, NULL) == HPML_OK && hpml_trace_save(ctx, file("fifo")) == HPML_OK);
    ENSURE(read(fd, text, sizeof text - 1) > 0 && text[0] == '[');
    ENSURE(stat(file("fifo"), &is) == 0 && S_ISFIFO(is.st_mode) && files_like("fifo*") == 1);
    close(fd);
    hpml_ctx_free(ctx);
}

/* Every kind of file, mutated in every way: an error or an object, never a crash, nothing left. */
static int open_any(hpml_ctx *ctx, int kind, const char *path)
{
    switch (kind) {
    case 0: return hpml_dataset_load_idx(ctx, path, file("l")) != NULL;
    case 1: return hpml_dataset_load_idx(ctx, file("i"), path) != NULL;
    case 2: return hpml_dataset_load_cifar10(ctx, &path, 1) != NULL;
    case 3: return hpml_dataset_load_csv(ctx, path, -1, false) != NULL;
    case 4: return hpml_dataset_load_text(ctx, &path, 1, 2, false) != NULL;
    case 5: return hpml_npy_load(ctx, path) != NULL;
    case 6: return hpml_dataset_load_records(ctx, path) != NULL;
    default: return hpml_safetensors_open(ctx, path) != NULL;
    }
}

TEST(mutated_files)
{
    static const char *const names[] = { "i", "l", "cifar", "csv", "t", "a.npy", "d", "p" };
    static unsigned char good[1 << 16], bad[1 << 16];
    static const size_t  more[] = { 1, 8, 4096 };
    static unsigned char r[3073] = { 3 };
    hpml_rng rng = { .seed = 1 };
    put("i", images, sizeof images), put("l", labels, sizeof labels), put("t", "hello", 5);
    put("cifar", r, sizeof r), put("csv", "1,2,0\n3,4,1\n", 12);
    for (int kind = 0; kind < 8; kind++) {
        FILE  *f = fopen(file(names[kind]), "rb");
        size_t n = f ? fread(good, 1, sizeof good, f) : 0;
        ENSURE(f && n > 0);
        fclose(f);
        ENSURE(n + 4096 <= sizeof good);
        for (int round = 0; round < 703; round++) {
            size_t    m   = n;
            hpml_ctx *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1 });
            int       opened;
            memcpy(bad, good, n);
            memset(bad + n, 0, 4096);
            if (round >= 700) m = n + more[round - 700]; /* longer than it should be */
            else if (round < 250) m = n * (size_t)round / 250;
            else if (round < 600)
                for (int k = 0; k < 1 + round % 3; k++) {
                    int64_t at = hpml_rng_below(&rng, round % 2 || n < 40 ? (int64_t)n : 40);
                    bad[at] ^= (unsigned char)(1 << (hpml_rng_u32(&rng) & 7));
                }
            else for (size_t k = 0; k < n; k++) bad[k] = (unsigned char)hpml_rng_u32(&rng);
            opened = open_any(ctx, kind, put("mutant", bad, m));
            /* a text has no size */
            ENSURE(opened == (hpml_ctx_status(ctx) == HPML_OK) && (round < 700 || opened == (kind == 4)));
            hpml_ctx_free(ctx);
        }
    }
}

/* What else takes memory: a training with its loader, files of its own, timeline and tables. */
static hpml_status use_all(hpml_ctx *ctx)
{
    static const float   x[20] = { 1, 2, 3 };
    static const int32_t y[5]  = { 0, 1, 0, 1, 1 };
    float         out[8];
    hpml_metrics  m = { 0 };
    hpml_trainer *t = small_trainer(ctx);
    hpml_dataset *d = hpml_dataset_create(ctx, 5, HPML_DTYPE_F32, 1, (int64_t[]){ 3 }, x, HPML_DTYPE_I32, 1, y);
    hpml_trace_start(ctx, &(hpml_trace_desc){ .capacity = 64 });
    hpml_profile_enable(hpml_trainer_graph(t), true);
    hpml_trainer_fit(t, d, NULL);
    hpml_trainer_evaluate(t, d, &m);
    hpml_trainer_predict(t, x, 4, out);
    hpml_checkpoint_save(t, file("k"));
    hpml_checkpoint_load(t, file("k"));
    hpml_params_save(ctx, file("h"), HPML_DTYPE_F16);
    hpml_params_load(ctx, file("h"));
    hpml_dataset_save_records(d, file("d2"));
    hpml_npy_save(hpml_param_at(ctx, 0), file("b.npy"));
    hpml_trace_save(ctx, file("trace"));
    return hpml_ctx_status(ctx);
}

/* The k-th allocation fails, for every k until none does: an error or success, nothing left behind. */
TEST(failing_allocator_leaks_nothing)
{
    static const char *const names[] = { "i", "l", "cifar", "csv", "t", "a.npy", "d", "p" };
    for (int kind = 0; kind < 9; kind++)
        for (size_t k = 1, done = 0; !done; k++) {
            meter         m   = { .fail_at = k };
            hpml_ctx_desc d   = { .threads = 1, .allocator = { meter_alloc, meter_free, &m } };
            hpml_ctx     *ctx = hpml_ctx_create(&d);
            int           ok  = kind < 8 ? open_any(ctx, kind, file(names[kind])) : use_all(ctx) == HPML_OK;
            done = m.calls < k;
            if (done ? !ok : ctx && (ok || hpml_ctx_status(ctx) != HPML_ERR_MEMORY))
                printf("    kind %d, allocation %d: %d, %s\n", kind, (int)k, ok, hpml_ctx_error(ctx)), test_failed = 1;
            hpml_ctx_free(ctx);
            ENSURE(m.live == 0 && k < 1000);
        }
}

/* For 1 to 8 ranks: the same global batches, disjoint, complete, equal numbers of steps. */
TEST(loader_order_does_not_depend_on_ranks)
{
    enum { N = 103, BATCH = 24 };
    static float x[N];
    static int   order[N];
    for (int i = 0; i < N; i++) x[i] = (float)i;
    for (int ranks = 1; ranks <= 8; ranks++) {
        hpml_ctx     *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .seed = 4 });
        hpml_dataset *d = hpml_dataset_create(ctx, N, HPML_DTYPE_F32, 1, (int64_t[]){ 1 }, x, HPML_DTYPE_I32, 0, NULL);
        int           seen[N] = { 0 }, least = N, most = 0;
        for (int r = 0; r < ranks; r++) {
            hpml_loader *l = hpml_loader_create(ctx, d, &(hpml_loader_desc){
                .batch = (BATCH + ranks - 1) / ranks, .global_batch = BATCH, .rank = r, .ranks = ranks,
                .no_prefetch = r % 2 });
            hpml_batch   b;
            int          mine = 0, steps = 0;
            size_t       before = hpml_ctx_allocations(ctx);
            ENSURE(l && hpml_loader_steps(l) == 5);
            while (hpml_loader_next(l, &b)) {
                ENSURE(b.samples == b.global_samples / ranks || b.samples == b.global_samples / ranks + 1);
                for (int64_t i = 0; i < b.samples; i++) {
                    int at = (int)(b.index * BATCH + b.first + i), v = (int)((const float *)b.x)[i];
                    if (ranks == 1) order[at] = v;
                    ENSURE(order[at] == v);
                    seen[v]++;
                    mine++;
                }
                steps++;
            }
            ENSURE(steps == 5 && hpml_ctx_allocations(ctx) == before);
            if (mine < least) least = mine;
            if (mine > most) most = mine;
            ENSURE(hpml_loader_next(l, &b) && b.index == 0); /* the next epoch */
            hpml_loader_free(l);
        }
        for (int i = 0; i < N; i++) ENSURE(seen[i] == 1);
        ENSURE(BATCH % ranks || most - least <= 1); /* of the epoch; where shares differ, they do in each batch */
        hpml_ctx_free(ctx);
    }
    ENSURE(order[0] != 0 || order[1] != 1 || order[2] != 2);
}

/* n images of 8 x 8, without labels. */
static hpml_dataset *pixels(hpml_ctx *ctx, int64_t n, hpml_dtype dtype, const void *x)
{
    return hpml_dataset_create(ctx, n, dtype, 3, (int64_t[]){ 1, 8, 8 }, x, HPML_DTYPE_I32, 0, NULL);
}

TEST(augmentation_and_prefetch)
{
    static unsigned char x[20 * 64];
    float first[2][64 * 8];
    for (int i = 0; i < 20 * 64; i++) x[i] = (unsigned char)(i * 7);
    for (int k = 0; k < 2; k++) {
        hpml_ctx     *ctx = hpml_ctx_create(NULL);
        hpml_dataset *d = pixels(ctx, 20, HPML_DTYPE_U8, x);
        hpml_loader_desc with = { .batch = 8, .no_prefetch = k, .augment = { 2, true, 3 } };
        hpml_loader  *l = hpml_loader_create(ctx, d, &with);
        hpml_batch    b;
        ENSURE(hpml_loader_seek(l, 3, 1) == HPML_OK && hpml_loader_next(l, &b) && b.index == 1);
        memcpy(first[k], b.x, sizeof first[k]);
        hpml_ctx_free(ctx);
    }
    ENSURE(memcmp(first[0], first[1], sizeof first[0]) == 0);
}

/* Whether `to` is `from` moved by (dx, dy), flipped or not, zeros coming in, with a square of `cut` pixels or less left
   out. */
static bool moved(const float *to, const float *from, int dx, int dy, int flip, int cut)
{
    int top = 8, left = 8, bottom = -1, right = -1;
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 8; j++) {
            int   u = i + dy, v = (flip ? 7 - j : j) + dx;
            float want = u < 0 || u > 7 || v < 0 || v > 7 ? 0 : from[8 * u + v];
            if (to[8 * i + j] == want) continue;
            if (to[8 * i + j] != 0) return false;
            top = i < top ? i : top, bottom = i > bottom ? i : bottom;
            left = j < left ? j : left, right = j > right ? j : right;
        }
    for (int i = top; i <= bottom; i++)
        for (int j = left; j <= right; j++)
            if (to[8 * i + j] != 0) return false;
    return bottom - top < cut && right - left < cut;
}

/* Over many passes every shift comes, flipped and not, and every place of the hole; a pass has its own. */
TEST(augmentation_does_what_it_says)
{
    static float x[64];
    static const hpml_augment with[] = { { 2, false, 0 }, { 0, true, 0 }, { 2, true, 0 }, { 0, false, 3 } };
    static const int          kinds[] = { 25, 2, 50, 1 };
    for (int i = 0; i < 64; i++) x[i] = (float)(i + 1);
    for (int k = 0; k < 4; k++) {
        hpml_ctx     *ctx = hpml_ctx_create(NULL);
        hpml_dataset *d = pixels(ctx, 1, HPML_DTYPE_F32, x);
        hpml_loader  *l = hpml_loader_create(ctx, d, &(hpml_loader_desc){ .batch = 1, .augment = with[k] });
        int           seen[50] = { 0 }, zero[64] = { 0 }, different = 0;
        hpml_batch    b;
        ENSURE(l);
        for (int pass = 0; pass < 600; pass++) {
            int found = -1;
            ENSURE(hpml_loader_seek(l, pass, 0) == HPML_OK && hpml_loader_next(l, &b));
            const float *to = (const float *)b.x;
            for (int s = 0; s < 50; s++) {
                int dx = s % 5 - 2, dy = s / 5 % 5 - 2, flip = s / 25;
                bool may = (with[k].shift || (!dx && !dy)) && (with[k].flip || !flip);
                if (may && moved(to, x, dx, dy, flip, with[k].cutout)) found = s;
            }
            ENSURE(found >= 0);
            seen[found]++;
            for (int i = 0; i < 64; i++) zero[i] += to[i] == 0;
        }
        for (int s = 0; s < 50; s++) different += seen[s] > 0;
        ENSURE(different == kinds[k]);
        for (int i = 0; i < 64; i++) ENSURE(k != 3 || (zero[i] > 0 && zero[i] < 300));
        hpml_ctx_free(ctx);
    }
}

/* A part of 5 x 5 of an image of 8 x 8, and of one with zeros around it: every place comes, the middle where nothing is
   shuffled. fit and evaluate hand a model what it takes. */
TEST(images_are_cropped)
{
    static float x[2 * 64];
    for (int i = 0; i < 2 * 64; i++) x[i] = (float)(i + 1);
    for (int k = 0; k < 3; k++) {
        hpml_ctx        *ctx = hpml_ctx_create(NULL);
        hpml_dataset    *d = hpml_dataset_create(ctx, 1, HPML_DTYPE_F32, 3, (int64_t[]){ 2, 8, 8 }, x,
                                                 HPML_DTYPE_I32, 0, NULL);
        int              seen[6][6] = { { 0 } }, places = 0, shift = k == 1;
        hpml_loader_desc with = { .batch = 1, .in_order = k == 2, .augment.shift = shift };
        d->x_crop = 5;
        hpml_loader *l = hpml_loader_create(ctx, d, &with);
        for (int pass = 0; pass < 600; pass++) {
            hpml_batch b;
            ENSURE(hpml_loader_seek(l, pass, 0) == HPML_OK && hpml_loader_next(l, &b));
            const float *to = (const float *)b.x;
            int at = (int)to[12] - 1, top = at / 8 - 2, left = at % 8 - 2; /* of its middle, which is never a zero */
            for (int i = 0; i < 50; i++) {
                int u = top + i % 25 / 5, v = left + i % 5;
                ENSURE(to[i] == (u < 0 || u > 7 || v < 0 || v > 7 ? 0 : x[64 * (i / 25) + 8 * u + v]));
            }
            seen[top + shift][left + shift]++;
        }
        for (int i = 0; i < 36; i++) places += seen[i / 6][i % 6] > 0;
        ENSURE(places == (k == 0 ? 16 : k == 1 ? 36 : 1) && seen[1 + shift][1 + shift] > 0);
        d->x_crop = 9;
        ENSURE_ERROR(ctx, !hpml_loader_create(ctx, d, &with), HPML_ERR_SHAPE, "x_crop 9 of images of 8x8");
        hpml_ctx_free(ctx);
    }
    hpml_ctx     *ctx = hpml_ctx_create(NULL);
    hpml_dataset *d = hpml_dataset_create(ctx, 1, HPML_DTYPE_F32, 3, (int64_t[]){ 2, 8, 8 }, x, HPML_DTYPE_I32, 1,
                                          (int32_t[]){ 0 });
    hpml_tensor  *in = hpml_input_4d(ctx, 1, 2, 5, 5);
    hpml_trainer *t  = hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = in, .output = hpml_linear(hpml_flatten(in), 2, NULL), .lr = 1e-6f });
    hpml_metrics  m  = { 0 };
    d->x_crop = 5;
    ENSURE(t && hpml_trainer_fit(t, d, NULL) == HPML_OK);
    ENSURE(hpml_trainer_evaluate(t, d, &m) == HPML_OK && m.samples == 1);
    d->x_crop = 0;
    ENSURE(hpml_trainer_fit(t, d, NULL) == HPML_ERR_SHAPE);
    hpml_ctx_free(ctx);
}

/* Arrays of files that numpy has written; damaged, cut and wrong ones are errors. */
TEST(arrays_in_npz_files)
{
    static const float   x[6] = { 1, 2, 3, 4, 5, 6.5f };
    unsigned char        changed[sizeof npz_stored];
    hpml_ctx            *ctx  = hpml_ctx_create(NULL);
    const char          *path = put("a.npz", npz_stored, sizeof npz_stored);
    hpml_tensor         *t    = hpml_npz_load(ctx, path, "x");
    ENSURE(t && t->ndim == 2 && t->shape[1] == 3 && memcmp(t->data, x, sizeof x) == 0);
    t = hpml_npz_load(ctx, path, "y.npy");
    ENSURE(t && t->dtype == HPML_DTYPE_I32 && ((const int32_t *)t->raw)[1] == -8);
    ENSURE_ERROR(ctx, !hpml_npz_load(ctx, path, "z"), HPML_ERR_FORMAT, "has no array \"z\"; it has x.npy, y.npy");
    memcpy(changed, npz_stored, sizeof changed);
    changed[200] ^= 1; /* a number of x */
    ENSURE_ERROR(ctx, !hpml_npz_load(ctx, put("b.npz", changed, sizeof changed), "x"), HPML_ERR_FORMAT, "is damaged");
    for (size_t n = 1; n < sizeof npz_stored; n++) {
        ENSURE(!hpml_npz_load(ctx, put("b.npz", npz_stored, n), "x"));
        hpml_ctx_clear_error(ctx);
    }
    path = put("c.npz", npz_packed, sizeof npz_packed);
    t    = hpml_npz_load(ctx, path, "x");
#ifdef HPML_USE_ZLIB
    ENSURE(t && memcmp(t->data, x, sizeof x) == 0);
#else
    ENSURE_ERROR(ctx, !t, HPML_ERR_UNSUPPORTED, "build with -DHPML_USE_ZLIB");
#endif
    hpml_ctx_free(ctx);
}

/* Appends a member to a tar file in memory; returns the file's size then. */
static size_t tar_add(unsigned char *tar, size_t at, const char *name, char kind, const void *bytes, size_t size)
{
    unsigned sum = 0;
    memset(tar + at, 0, 512 + (size + 511) / 512 * 512);
    strcpy((char *)tar + at, name);
    snprintf((char *)tar + at + 100, 37, "0000644%c0000000%c0000000%c%011o", 0, 0, 0, (unsigned)size);
    tar[at + 156] = (unsigned char)kind;
    memset(tar + at + 148, ' ', 8);
    for (int i = 0; i < 512; i++) sum += tar[at + (size_t)i];
    snprintf((char *)tar + at + 148, 8, "%06o", sum);
    memcpy(tar + at + 512, bytes, size);
    return at + 512 + (size + 511) / 512 * 512;
}

/* Two shards; members of other kinds, folders and files without a sample are ignored. */
TEST(samples_in_tar_files)
{
    static unsigned char tar[8192];
    const float   three[3] = { 1.5f, 2.5f, 3.5f };
    unsigned char array[128] = { 0 };
    hpml_ctx     *ctx = hpml_ctx_create(NULL);
    FILE         *f = fopen(npy("n.npy", "{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }", three, 12), "rb");
    size_t        bytes = fread(array, 1, sizeof array, f), n = 0;
    fclose(f);
    n = tar_add(tar, n, "train/", '5', "", 0);
    n = tar_add(tar, n, "train/0001.npy", '0', array, bytes);
    n = tar_add(tar, n, "train/0001.txt", '0', "words", 5);
    n = tar_add(tar, n, "train/0001.cls", '0', "7\n", 2);
    n = tar_add(tar, n, "train/0002.cls", '0', "0", 1);
    n = tar_add(tar, n, "train/0002.npy", 0, array, bytes);
    char        *a = strdup(put("a.tar", tar, n)), *b = strdup(put("b.tar", tar, 512 + 512 + 512));
    const char  *both[2] = { a, b };
    hpml_dataset *d = hpml_dataset_load_tar(ctx, both, 1, "npy", "cls");
    ENSURE(d && d->count == 2 && d->x_dtype == HPML_DTYPE_F32 && d->x_shape[0] == 3 && d->classes == 8);
    ENSURE(((const float *)d->x)[5] == 3.5f && ((const int32_t *)d->y)[0] == 7 && ((const int32_t *)d->y)[1] == 0);
    ENSURE((d = hpml_dataset_load_tar(ctx, both, 2, "npy", NULL)) && d->count == 3 && d->y_size == 0);
    ENSURE((d = hpml_dataset_load_tar(ctx, both, 1, "cls", "npy")) == NULL); /* x of 2 bytes and of 1 */
    ENSURE_ERROR(ctx, true, HPML_ERR_SHAPE, "sample \"0002\" has another type or shape");
    ENSURE_ERROR(ctx, !hpml_dataset_load_tar(ctx, both, 2, "npy", "cls"), HPML_ERR_FORMAT,
                 "sample \"0001\" has no member \"0001.cls\"");
    ENSURE_ERROR(ctx, !hpml_dataset_load_tar(ctx, both, 1, "jpg", NULL), HPML_ERR_FORMAT, "ends in .jpg");
    tar[512 + 150] ^= 1; /* a checksum */
    put("a.tar", tar, n);
    ENSURE_ERROR(ctx, !hpml_dataset_load_tar(ctx, both, 1, "npy", "cls"), HPML_ERR_FORMAT, "damaged, at byte 512");
    free(a);
    free(b);
    hpml_ctx_free(ctx);
}

/* Whether this program's numbers have a comma now, as in a locale that is made here. */
static bool commas(void)
{
    static const char source[] = "LC_NUMERIC\ndecimal_point \",\"\nthousands_sep \".\"\ngrouping 3;3\nEND LC_NUMERIC\n";
    char command[600], text[8];
    put("comma", source, sizeof source - 1);
    snprintf(command, sizeof command, "cd %s && localedef -c -i comma ./comma_XX >out 2>&1", folder);
    int made = system(command); /* not 0 for what is missing but numbers */
    setenv("LOCPATH", folder, 1);
    snprintf(text, sizeof text, "%.1f", made == -1 || !setlocale(LC_NUMERIC, "comma_XX") ? 0.0 : 1.5);
    return strcmp(text, "1,5") == 0;
}

/* In the trace, what follows a number is the next field, or the end. */
static bool numbers_end(const char *all, const char *field)
{
    int count = 0;
    for (const char *p = all; (p = strstr(p, field)) != NULL; count++) {
        p += strlen(field);
        p += strspn(p, "-0123456789.");
        if (*p != '}' && (p[0] != ',' || p[1] != '"')) return false;
    }
    return count > 0;
}

TEST(files_do_not_mind_the_locale)
{
    static char all[1 << 16];
    if (!commas()) { setlocale(LC_NUMERIC, "C"); SKIP("no localedef that makes a locale with commas"); }
    hpml_ctx     *ctx = hpml_ctx_create(NULL);
    hpml_dataset *d   = csv(ctx, "1.5,-2.25e1,0\n0.125,3,1\n", -1, false);
    ENSURE(d && ((const float *)d->x)[0] == 1.5f && ((const float *)d->x)[1] == -22.5f);
    ENSURE((d = csv(ctx, "1.5;2\n2.5;4.75\n", -1, true)) && ((const float *)d->y)[1] == 4.75f);
    hpml_tensor  *in = hpml_input_2d(ctx, 1, 1), *out = hpml_linear(in, 1, NULL);
    hpml_trainer *t  = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = in, .output = out,
        .loss = HPML_LOSS_MSE, .lr = 0.01f, .momentum = 0.5f });
    hpml_trace_start(ctx, NULL);
    ENSURE(hpml_trainer_fit(t, d, NULL) == HPML_OK && hpml_trace_save(ctx, file("trace")) == HPML_OK);
    ENSURE(hpml_checkpoint_save(t, file("saved")) == HPML_OK && hpml_checkpoint_load(t, file("saved")) == HPML_OK);
    ENSURE(hpml_npy_save(hpml_param_at(ctx, 0), file("npy")) == HPML_OK && hpml_npy_load(ctx, file("npy")));
    FILE *f = fopen(file("trace"), "rb");
    ENSURE(f && fread(all, 1, sizeof all - 1, f) > 100 && fclose(f) == 0);
    ENSURE(numbers_end(all, "\"ts\":") && numbers_end(all, "\"dur\":"));
    setlocale(LC_NUMERIC, "C");
    hpml_ctx_free(ctx);
}
