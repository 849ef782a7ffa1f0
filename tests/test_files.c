/* Links, pipes, modes, files that shrink, faults of every call that reads and writes, damaged and senseless content,
   the memory that a file may cost. The linker puts the wrappers below in the place of the system's calls (build.ninja:
   --wrap). */
#define _GNU_SOURCE
#include "meter.h"
#include "files.h"
#include "test.h"
#include <errno.h>
#include <fcntl.h>
#include <float.h>
#ifdef HPML_USE_ZLIB
#include <zlib.h>
#endif

/* Faults: call number `at` of those below fails, or all from it on. 0: none. */
static struct { int calls, at, why; bool on; } fault;

static bool faulty(void)
{
    if (fault.at == 0) return false;
    fault.calls++;
    if (fault.on ? fault.calls < fault.at : fault.calls != fault.at) return false;
    errno = fault.why;
    return true;
}

static const char *shrinks; /* a file that is cut short when a reader has just opened it */

int     __real_open(const char *path, int flags, ...);
int     __real_close(int fd);
int     __real_ftruncate(int fd, off_t size);
int     __real_fchmod(int fd, mode_t mode);
int     __real_rename(const char *from, const char *to);
int     __real_remove(const char *path);
FILE   *__real_fdopen(int fd, const char *mode);
int     __wrap_open(const char *path, int flags, mode_t mode);
int     __wrap_close(int fd);
int     __wrap_fsync(int fd);
int     __wrap_ftruncate(int fd, off_t size);
int     __wrap_fchmod(int fd, mode_t mode);
int     __wrap_rename(const char *from, const char *to);
int     __wrap_remove(const char *path);
FILE   *__wrap_fdopen(int fd, const char *mode);

int __wrap_open(const char *path, int flags, mode_t mode) { return faulty() ? -1 : __real_open(path, flags, mode); }
int __wrap_fsync(int fd) { return faulty() || fd < 0 ? -1 : 0; } /* these files need not outlive a crash */
int __wrap_ftruncate(int fd, off_t size) { return faulty() ? -1 : __real_ftruncate(fd, size); }
int __wrap_fchmod(int fd, mode_t mode) { return faulty() ? -1 : __real_fchmod(fd, mode); }
int __wrap_rename(const char *from, const char *to) { return faulty() ? -1 : __real_rename(from, to); }
int __wrap_remove(const char *path) { return faulty() ? -1 : __real_remove(path); }

int __wrap_close(int fd) /* as Linux does: it is closed even where that fails */
{
    bool bad = faulty();
    int  closed = __real_close(fd);
    if (bad) errno = fault.why;
    return bad ? -1 : closed;
}

/* A stream whose every read and write may fail. */
static ssize_t stream_read(void *fd, char *to, size_t size)
{
    return faulty() ? -1 : read((int)(intptr_t)fd, to, size);
}

static ssize_t stream_write(void *fd, const char *from, size_t size)
{
    return faulty() ? 0 : write((int)(intptr_t)fd, from, size); /* 0: the way of these streams to say error */
}

static int stream_seek(void *fd, off64_t *to, int from)
{
    *to = faulty() ? -1 : lseek((int)(intptr_t)fd, *to, from);
    return *to < 0 ? -1 : 0;
}

static int stream_close(void *fd) { return __wrap_close((int)(intptr_t)fd); }

FILE *__wrap_fdopen(int fd, const char *mode)
{
    cookie_io_functions_t calls = { stream_read, stream_write, stream_seek, stream_close };
    struct stat           named, opened;
    bool                  same = shrinks && stat(shrinks, &named) == 0 && fstat(fd, &opened) == 0;
    if (same && named.st_ino == opened.st_ino && truncate(shrinks, opened.st_size - 5) != 0)
        exit(1);
    if (fault.at == 0) return __real_fdopen(fd, mode);
    return faulty() ? NULL : fopencookie((void *)(intptr_t)fd, mode, calls);
}

static hpml_trainer *small_trainer(hpml_ctx *ctx)
{
    hpml_tensor  *x = hpml_input_2d(ctx, 4, 3), *y = hpml_linear(x, 2, &(hpml_linear_desc){ .name = "fc" });
    const float   in[12] = { 1, 2, 3, 4 };
    const int32_t labels[4] = { 0, 1 };
    hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){
        .input = x, .output = y, .optimizer = HPML_OPT_ADAM });
    hpml_trainer_step(t, in, labels, 4, NULL);
    return t;
}

/* Every kind of file that is written, with `value` somewhere in it. */
enum { SAFETENSORS, PARAMS, CHECKPOINT, RECORDS, NPY, TRACE, KINDS };

static hpml_status save(hpml_trainer *t, hpml_ctx *ctx, int kind, const char *path, float value)
{
    static float    x[3000];
    hpml_safetensor e = { "x", HPML_DTYPE_F32, 1, { 3000 }, x, sizeof x };
    x[7] = value;
    hpml_param_at(ctx, 0)->data[1] = value;
    if (kind == SAFETENSORS) return hpml_safetensors_save(ctx, path, &e, 1, NULL, 0);
    if (kind == PARAMS) return hpml_params_save(ctx, path, HPML_DTYPE_F32);
    if (kind == CHECKPOINT) return hpml_checkpoint_save(t, path);
    if (kind == NPY) return hpml_npy_save(hpml_param_at(ctx, 0), path);
    if (kind == TRACE) {
        hpml_trace_start(ctx, &(hpml_trace_desc){ .rank = (int)value, .capacity = 8 });
        return hpml_trace_save(ctx, path);
    }
    hpml_dataset *d = hpml_dataset_create(ctx, 5, HPML_DTYPE_F32, 1, (int64_t[]){ 600 }, x, HPML_DTYPE_I32, 0, NULL);
    hpml_dataset_save_records(d, path);
    hpml_dataset_free(d);
    return hpml_ctx_status(ctx);
}

static bool same_file(const char *path, const char *other)
{
    static char a[1 << 16], b[1 << 16];
    FILE       *f = fopen(path, "rb"), *g = fopen(other, "rb");
    size_t      n = f ? fread(a, 1, sizeof a, f) : 0, m = g ? fread(b, 1, sizeof b, g) : 1;
    if (f) fclose(f);
    if (g) fclose(g);
    return n > 0 && n == m && memcmp(a, b, n) == 0;
}

static int next_descriptor(void)
{
    int fd = dup(0);
    __real_close(fd);
    return fd;
}

/* One call fails, or all from one on: the old file or the new one is there, whole; an error names file and reason. */
TEST(every_call_of_a_save_may_fail)
{
    static const int why[] = { EIO, ENOSPC };
    for (int kind = 0; kind < KINDS; kind++) {
        hpml_ctx     *ctx  = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1 });
        hpml_trainer *t    = small_trainer(ctx);
        int           next = next_descriptor(), failures = 0;
        ENSURE(save(t, ctx, kind, file("old"), 1) == HPML_OK && save(t, ctx, kind, file("new"), 2) == HPML_OK);
        for (int k = 1, on = 0, done = 0; !done; k++) {
            ENSURE(save(t, ctx, kind, file("f"), 1) == HPML_OK && files_like("f*") == 1);
            chmod(file("f"), 0640);
            fault.at = k, fault.on = on, fault.calls = 0, fault.why = why[on];
            hpml_status status = save(t, ctx, kind, file("f"), 2);
            bool        hit = fault.calls >= k;
            fault.at = 0;
            bool is_new = same_file(file("f"), file("new")), is_old = same_file(file("f"), file("old"));
            if (status == HPML_OK) ENSURE(is_new);
            else {
                failures++;
                ENSURE(is_old || is_new);
                ENSURE(status == HPML_ERR_WRITE && strstr(hpml_ctx_error(ctx), file("f")));
                ENSURE(strstr(hpml_ctx_error(ctx), strerror(why[on])));
            }
            hpml_ctx_clear_error(ctx);
            ENSURE(files_like("f*") <= 2 && files_like("f.tmp*") == files_like("f*") - 1);
            ENSURE(next_descriptor() == next);
            if (!hit && on) done = 1;
            if (!hit && !on) on = 1, k = 0;
            glob_t left; /* what is left of a numbered name stays for ever, because only its writer knows that it is */
            if (glob(file("f.tmp?*"), 0, NULL, &left) == 0) remove(left.gl_pathv[0]);
            globfree(&left);
        }
        ENSURE(failures >= 12);
        hpml_ctx_free(ctx);
    }
}

/* Every reader that copies. */
enum { READ_IDX, READ_LABELS, READ_CIFAR, READ_CSV, READ_TEXT, READ_NPY, READ_RECORDS, READ_PARAMS, READ_CHECKPOINT,
       COPYING, MAP_RECORDS = COPYING, MAP_SAFETENSORS, READERS };
static const char *const sources[] = { "i", "l", "cifar", "csv", "text", "npy", "records", "params", "checkpoint",
                                       "records", "params" };

static bool read_any(hpml_trainer *t, hpml_ctx *ctx, int kind, const char *path)
{
    switch (kind) {
    case READ_IDX: return hpml_dataset_load_idx(ctx, path, file("l")) != NULL;
    case READ_LABELS: return hpml_dataset_load_idx(ctx, file("i"), path) != NULL;
    case READ_CIFAR: return hpml_dataset_load_cifar10(ctx, &path, 1) != NULL;
    case READ_CSV: return hpml_dataset_load_csv(ctx, path, -1, false) != NULL;
    case READ_TEXT: return hpml_dataset_load_text(ctx, &path, 1, 2, false) != NULL;
    case READ_NPY: return hpml_npy_load(ctx, path) != NULL;
    case READ_RECORDS: return hpml_dataset_load_records(ctx, path) != NULL;
    case READ_PARAMS: return hpml_params_load(ctx, path) == HPML_OK;
    case READ_CHECKPOINT: return hpml_checkpoint_load(t, path) == HPML_OK;
    case MAP_RECORDS: return hpml_records_open(ctx, path) != NULL;
    default: return hpml_safetensors_open(ctx, path) != NULL;
    }
}

static void write_sources(hpml_trainer *t, hpml_ctx *ctx)
{
    static unsigned char idx[16 + 40] = { 0, 0, 8, 3, 0, 0, 0, 40, 0, 0, 0, 1, 0, 0, 0, 1 };
    static unsigned char labels[8 + 40] = { 0, 0, 8, 1, 0, 0, 0, 40 };
    static unsigned char cifar[3073] = { 3 };
    put("i", idx, sizeof idx), put("l", labels, sizeof labels), put("cifar", cifar, sizeof cifar);
    put("csv", "1,2,0\n3,4,1\n1,2,0\n3,4,1\n1,2,0\n3,4,1\n", 36), put("text", "hello, you there; and many more", 31);
    save(t, ctx, NPY, file("npy"), 1), save(t, ctx, RECORDS, file("records"), 1);
    save(t, ctx, PARAMS, file("params"), 1), save(t, ctx, CHECKPOINT, file("checkpoint"), 1);
}

TEST(every_call_of_a_reader_may_fail)
{
    hpml_ctx     *ctx  = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1 });
    hpml_trainer *t    = small_trainer(ctx);
    int           next = next_descriptor();
    write_sources(t, ctx);
    for (int kind = 0; kind < COPYING; kind++)
        for (int k = 1, done = 0, failures = 0; !done; k++) {
            fault.at = k, fault.calls = 0, fault.on = false, fault.why = EIO;
            bool good = read_any(t, ctx, kind, file(sources[kind]));
            done     = fault.calls < k;
            fault.at = 0, failures += !good;
            if (!good) ENSURE(strstr(hpml_ctx_error(ctx), folder) && strstr(hpml_ctx_error(ctx), strerror(EIO)));
            hpml_ctx_clear_error(ctx);
            ENSURE((!done || (good && failures >= 3)) && next_descriptor() == next);
        }
    hpml_ctx_free(ctx);
}

/* Another program cuts the file short after it was opened. */
TEST(readers_report_files_that_shrink)
{
    hpml_ctx     *ctx  = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1 });
    hpml_trainer *t    = small_trainer(ctx);
    for (int kind = 0; kind < COPYING; kind++) {
        write_sources(t, ctx);
        char path[160];
        shrinks   = strcpy(path, file(sources[kind]));
        bool good = read_any(t, ctx, kind, path);
        shrinks   = NULL;
        ENSURE_ERROR(ctx, !good, HPML_ERR_READ, "became shorter while");
    }
    hpml_ctx_free(ctx);
}

TEST(pipes_devices_and_folders_are_refused_at_once)
{
    hpml_ctx     *ctx  = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1 });
    hpml_trainer *t    = small_trainer(ctx);
    write_sources(t, ctx);
    ENSURE(mkfifo(file("fifo"), 0600) == 0);
    alarm(120); /* ends a reader that waits */
    for (int kind = 0; kind < READERS; kind++) {
        ENSURE_ERROR(ctx, !read_any(t, ctx, kind, file("fifo")), HPML_ERR_OPEN, "it is a pipe or a device");
        ENSURE_ERROR(ctx, !read_any(t, ctx, kind, "/dev/zero"), HPML_ERR_OPEN, "it is a pipe or a device");
        ENSURE_ERROR(ctx, !read_any(t, ctx, kind, folder), HPML_ERR_OPEN, "it is a folder");
        ENSURE(read_any(t, ctx, kind, file(sources[kind])));
    }
    alarm(0);
    hpml_ctx_free(ctx);
}

/* npy and the timeline are written front to back and go into a pipe; what ends at its start is refused unwritten. */
TEST(saving_into_a_pipe)
{
    hpml_ctx     *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1 });
    hpml_trainer *t   = small_trainer(ctx);
    char          text[1 << 15];
    ENSURE(mkfifo(file("out"), 0600) == 0);
    int fd = open(file("out"), O_RDWR | O_NONBLOCK);
    for (int kind = 0; kind < KINDS; kind++) {
        hpml_status status = save(t, ctx, kind, file("out"), 1);
        ssize_t     n = read(fd, text, sizeof text);
        if (kind == NPY || kind == TRACE) {
            ENSURE(status == HPML_OK && save(t, ctx, kind, file("plain"), 1) == HPML_OK);
            put("piped", text, (size_t)n);
            ENSURE(same_file(file("piped"), file("plain")));
        } else {
            ENSURE(n < 0);
            ENSURE_ERROR(ctx, status != HPML_OK, HPML_ERR_WRITE, "completed at its start; save to a file");
        }
    }
    ENSURE_ERROR(ctx, save(t, ctx, TRACE, "/dev/full", 1) != HPML_OK, HPML_ERR_WRITE, strerror(ENOSPC));
    __real_close(fd);
    hpml_ctx_free(ctx);
}

/* A name that is a link, of one link more, to a file that is not there yet: the file is written, the links stay. */
TEST(links_are_followed)
{
    struct stat   is;
    hpml_ctx     *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1 });
    hpml_trainer *t   = small_trainer(ctx);
    ENSURE(mkdir(file("sub"), 0700) == 0 && symlink("sub/second", file("first")) == 0);
    ENSURE(symlink(file("target"), file("sub/second")) == 0 && symlink("loop", file("loop")) == 0);
    for (int round = 0; round < 2; round++) { /* without a target, and over it */
        ENSURE(save(t, ctx, PARAMS, file("first"), (float)round) == HPML_OK);
        ENSURE(lstat(file("first"), &is) == 0 && S_ISLNK(is.st_mode));
        ENSURE(lstat(file("sub/second"), &is) == 0 && S_ISLNK(is.st_mode));
        ENSURE(lstat(file("target"), &is) == 0 && S_ISREG(is.st_mode));
        ENSURE(files_like("target*") == 1 && files_like("sub/*") == 1);
        ENSURE(hpml_params_load(ctx, file("target")) == HPML_OK && hpml_param_at(ctx, 0)->data[1] == (float)round);
    }
    ENSURE_ERROR(ctx, save(t, ctx, PARAMS, file("loop"), 1) != HPML_OK, HPML_ERR_WRITE, strerror(ELOOP));
    hpml_ctx_free(ctx);
}

/* What another program has put where the temporary file will be is neither followed nor changed. */
TEST(temporary_names_are_not_trusted)
{
    struct stat   is;
    hpml_ctx     *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1 });
    hpml_trainer *t   = small_trainer(ctx);
    for (int hard = 0; hard < 2; hard++) {
        put("precious", "precious", 8), put("copy", "precious", 8);
        remove(file("w.tmp"));
        int made = hard ? link(file("precious"), file("w.tmp")) : symlink(file("precious"), file("w.tmp"));
        ENSURE(made == 0 && save(t, ctx, CHECKPOINT, file("w"), 1) == HPML_OK);
        ENSURE(same_file(file("precious"), file("copy")) && hpml_checkpoint_load(t, file("w")) == HPML_OK);
        ENSURE(lstat(file("w"), &is) == 0 && S_ISREG(is.st_mode) && is.st_nlink == 1 && files_like("w*") == 2);
    }
    ENSURE(remove(file("w.tmp")) == 0 && mkfifo(file("w.tmp"), 0600) == 0);
    ENSURE(save(t, ctx, CHECKPOINT, file("w"), 2) == HPML_OK && hpml_checkpoint_load(t, file("w")) == HPML_OK);
    ENSURE(lstat(file("w.tmp"), &is) == 0 && S_ISFIFO(is.st_mode) && files_like("w*") == 2);
    hpml_ctx_free(ctx);
}

TEST(a_save_keeps_the_mode)
{
    static const mode_t modes[] = { 0600, 0640, 0444, 0666 };
    struct stat   is;
    hpml_ctx     *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1 });
    hpml_trainer *t   = small_trainer(ctx);
    mode_t        mask = umask(022);
    ENSURE(save(t, ctx, PARAMS, file("m"), 1) == HPML_OK && stat(file("m"), &is) == 0 && (is.st_mode & 0777) == 0644);
    for (int i = 0; i < 4; i++)
        for (int kind = 0; kind < KINDS; kind++) {
            ENSURE(chmod(file("m"), modes[i]) == 0);
            put("m.tmp", "left by a save that was killed", 30);
            ENSURE(save(t, ctx, kind, file("m"), 1) == HPML_OK && stat(file("m"), &is) == 0);
            ENSURE((is.st_mode & 07777) == modes[i] && files_like("m*") == 1);
        }
    umask(mask);
    hpml_ctx_free(ctx);
}

/* The file at `path`, saved again with other metadata and, where `tensor` is given, other values of that tensor. */
static bool rewrite(hpml_ctx *ctx, const char *path, const char *key, const char *value, const char *tensor, float fill)
{
    static const char *const keys[] = { "hpml.seed", "hpml.step", "hpml.epoch", "hpml.epoch_step", "hpml.optimizer",
                                        "hpml.loss_scale", "hpml.scale_steps" };
    hpml_safetensors *f = hpml_safetensors_open(ctx, path);
    hpml_safetensor   e[16];
    hpml_meta         meta[7];
    float             values[64];
    int               n = hpml_safetensors_count(f);
    for (int i = 0; i < 64; i++) values[i] = fill;
    for (int i = 0; i < n; i++) {
        hpml_safetensors_at(f, i, &e[i]);
        if (tensor && strcmp(e[i].name, tensor) == 0) e[i].data = values;
    }
    for (int i = 0; i < 7; i++) {
        meta[i].key = keys[i], meta[i].value = hpml_safetensors_meta(f, keys[i]);
        if (key && strcmp(keys[i], key) == 0) meta[i].value = value;
    }
    hpml_status status = hpml_safetensors_save(ctx, file("other"), e, n, meta, 7);
    hpml_safetensors_close(f);
    return status == HPML_OK;
}

TEST(checkpoints_with_invalid_numbers_are_errors)
{
    static const struct { const char *key, *value, *says; } bad[] = {
        { "hpml.step", "9223372036854775807", "\"hpml.step\" is 9223372036854775807, expected 0 to 2^53" },
        { "hpml.scale_steps", "9223372036854775807", "9223372036854775807, expected -1 to 2^53" },
        { "hpml.step", "-1", "\"hpml.step\" is -1" }, { "hpml.epoch", "9007199254740993", "\"hpml.epoch\"" },
        { "hpml.epoch_step", "-9223372036854775808", "\"hpml.epoch_step\"" },
        { "hpml.step", "99999999999999999999", "is \"99999999999999999999\", expected a whole number" },
        { "hpml.seed", "0x10", "is \"0x10\", expected a whole number" }, { "hpml.epoch", "", "is \"\", expected" } };
    static const struct { const char *tensor; float fill; const char *says; } wrong[] = {
        { "fc.weight", NAN, "element 0 of \"fc.weight\" is nan, expected finite" },
        { "fc.bias", INFINITY, "element 0 of \"fc.bias\" is inf" },
        { "opt.mean.fc.bias", -INFINITY, "is -inf, expected" },
        { "opt.square_mean.fc.weight", -1, "is -1, expected finite numbers from 0" },
        { "opt.square_mean.fc.bias", NAN, "is nan" } };
    hpml_ctx     *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1 });
    hpml_trainer *t   = small_trainer(ctx);
    ENSURE(hpml_checkpoint_save(t, file("k")) == HPML_OK);
    uint64_t hash = hpml_param_hash(ctx);
    for (int i = 0; i < 8; i++) {
        ENSURE(rewrite(ctx, file("k"), bad[i].key, bad[i].value, NULL, 0));
        ENSURE_ERROR(ctx, hpml_checkpoint_load(t, file("other")), HPML_ERR_FORMAT, bad[i].says);
    }
    for (int i = 0; i < 5; i++) {
        ENSURE(rewrite(ctx, file("k"), NULL, NULL, wrong[i].tensor, wrong[i].fill));
        ENSURE_ERROR(ctx, hpml_checkpoint_load(t, file("other")), HPML_ERR_NONFINITE, wrong[i].says);
        if (i < 2) ENSURE_ERROR(ctx, hpml_params_load(ctx, file("other")), HPML_ERR_NONFINITE, wrong[i].says);
        ENSURE(hpml_param_hash(ctx) == hash);
    }
    ENSURE(rewrite(ctx, file("k"), "hpml.step", "9007199254740992", NULL, 0)); /* 2^53, and no checksums: as it was */
    ENSURE(hpml_checkpoint_load(t, file("other")) == HPML_OK && hpml_param_hash(ctx) == hash);
    hpml_ctx_free(ctx);
}

static uint32_t crc32c(const void *bytes, size_t n) /* by its definition */
{
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < n; i++) {
        crc ^= ((const unsigned char *)bytes)[i];
        for (int k = 0; k < 8; k++) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    }
    return ~crc;
}

TEST(checksums_on_every_instruction_set)
{
    static const char *const sets[] = { "scalar", "avx2", "avx512", "neon" };
    static const int64_t     sizes[] = { 1, 2, 3, 31, 255, 256, 257, 5001 };
    ENSURE(crc32c("123456789", 9) == 0xe3069283u);
    for (int set = 0; set < 4; set++) {
        hpml_ctx *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1, .cpu = sets[set] });
        for (int i = 0; i < 8 && hpml_ctx_status(ctx) == HPML_OK; i++) {
            char name[16], key[32], sum[9];
            snprintf(name, sizeof name, "p%d", i), snprintf(key, sizeof key, "hpml.crc32c.%s", name);
            hpml_tensor *p = hpml_param_create(ctx, &(hpml_param_desc){
                .ndim = 1, .shape = { sizes[i] }, .name = name, .init = HPML_INIT_NORMAL });
            ENSURE(hpml_params_save(ctx, file("sums"), HPML_DTYPE_F32) == HPML_OK);
            hpml_safetensors *f = hpml_safetensors_open(ctx, file("sums"));
            snprintf(sum, sizeof sum, "%08x", crc32c(p->data, (size_t)sizes[i] * 4));
            ENSURE(f && strcmp(hpml_safetensors_meta(f, key), sum) == 0);
            hpml_safetensors_close(f);
        }
        hpml_ctx_free(ctx);
    }
}

/* A bit of each byte of a checkpoint in turn: an error that names the array, or, where the name of a checksum is hit,
   the same training. */
TEST(damaged_checkpoints)
{
    static unsigned char bytes[1 << 16];
    hpml_ctx        *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1 });
    hpml_trainer    *t   = small_trainer(ctx);
    hpml_safetensor  e[16];
    const char      *first = NULL;
    int              count = 0;
    ENSURE(hpml_checkpoint_save(t, file("k")) == HPML_OK);
    FILE    *in = fopen(file("k"), "rb");
    size_t   n = fread(bytes, 1, sizeof bytes, in), data = 8 + bytes[0] + 256u * bytes[1];
    uint64_t hash = hpml_param_hash(ctx);
    fclose(in);
    hpml_safetensors *f = hpml_safetensors_open(ctx, file("k"));
    for (; hpml_safetensors_at(f, count, &e[count]); count++)
        if (!first || (const char *)e[count].data < first) first = (const char *)e[count].data;
    for (size_t at = 0; at < n; at++) {
        const char *name = "";
        char        says[64];
        for (int i = 0; i < count && at >= data; i++) {
            size_t from = data + (size_t)((const char *)e[i].data - first);
            if (at >= from && at < from + e[i].bytes) name = e[i].name;
        }
        snprintf(says, sizeof says, "\"%s\" is damaged: its CRC-32C is ", name);
        bytes[at] ^= (unsigned char)(1 << at % 8);
        put("bad", bytes, n);
        bytes[at] ^= (unsigned char)(1 << at % 8);
        hpml_status status = hpml_checkpoint_load(t, file("bad"));
        if (at >= data) ENSURE_ERROR(ctx, status, HPML_ERR_FORMAT, says);
        hpml_ctx_clear_error(ctx);
        ENSURE(hpml_param_hash(ctx) == hash && hpml_trainer_step_count(t) == 1);
    }
    hpml_ctx_free(ctx);
}

/* Headers of safetensors files: what the reference implementation (0.8) accepts and refuses. */
#define ENTRY(name, from) "\"" name "\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[" from "]}"
TEST(safetensors_headers_are_judged_as_by_the_reference)
{
    static const struct { bool good; const char *header; size_t data; } cases[] = {
        { true, "{" ENTRY("a", "0,4") "}", 4 }, { true, " \n{" ENTRY("a", "0,4") "\t}\r\n", 4 }, { true, "{}", 0 },
        { true, "{" ENTRY("a", "0,4") "," ENTRY("a", "0,4") "}", 4 },
        { true, "{" ENTRY("a", "7,90") "," ENTRY("a", "0,4") "}", 4 },
        { false, "{" ENTRY("a", "0,4") "," ENTRY("a", "4,8") "}", 8 },
        { true, "{\"a\":[\"F32\",[1],[0,4]]}", 4 }, { false, "{\"a\":[\"F32\",[1],[0,4],1]}", 4 },
        { false, "{\"a\":[\"F32\",[1]]}", 4 },
        { true, "{\"__metadata__\":null," ENTRY("a", "0,4") "}", 4 }, { true, "{\"__metadata__\":{}}", 0 },
        { true, "{\"__metadata__\":{\"k\":\"v\",\"k\":\"w\"}," ENTRY("a", "0,4") "}", 4 },
        { false, "{\"__metadata__\":{},\"__metadata__\":{}}", 0 }, { false, "{\"__metadata__\":{\"k\":1}}", 0 },
        { false, "{\"__metadata__\":[]}", 0 },
        { true, "{\"a\":{\"dtype\":\"F32\",\"more\":{\"x\":[1,-2.5e-3,true,null,\"y\"]},\"shape\":[1],"
                "\"data_offsets\":[0,4]}}", 4 },
        { false, "{\"a\":{\"dtype\":\"F32\",\"more\":[01],\"shape\":[1],\"data_offsets\":[0,4]}}", 4 },
        { false, "{\"a\":{\"dtype\":\"F32\",\"more\":.5,\"shape\":[1],\"data_offsets\":[0,4]}}", 4 },
        { false, "{\"a\":{\"dtype\":\"F32\",\"more\":1e400,\"shape\":[1],\"data_offsets\":[0,4]}}", 4 },
        { false, "{\"a\":{\"dtype\":\"F33\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4 },
        { false, "{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4 },
        { false, "{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4 },
        { false, "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"shape\":[1],\"data_offsets\":[0,4]}}", 4 },
        { false, "{\"a\":{\"dtype\":\"F32\",\"shape\":[01],\"data_offsets\":[0,4]}}", 4 },
        { false, "{\"a\":{\"dtype\":\"F32\",\"shape\":[1.0],\"data_offsets\":[0,4]}}", 4 },
        { false, "{\"a\":{\"dtype\":\"F32\",\"shape\":[18446744073709551616,0],\"data_offsets\":[0,0]}}", 0 },
        { true, "{\"a\":{\"dtype\":\"F32\",\"shape\":[18446744073709551615,0],\"data_offsets\":[0,0]}}", 0 },
        { false, "{\"a\":{\"dtype\":\"F32\",\"shape\":[18446744073709551615,2,0],\"data_offsets\":[0,0]}}", 0 },
        { true, "{\"a\":{\"dtype\":\"F4\",\"shape\":[3,2],\"data_offsets\":[0,3]}}", 3 },
        { false, "{\"a\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,2]}}", 2 },
        { false, "{" ENTRY("\xff", "0,4") "}", 4 }, { false, "{" ENTRY("\xc0\x80", "0,4") "}", 4 },
        { false, "{" ENTRY("\xed\xa0\x80", "0,4") "}", 4 }, { false, "{" ENTRY("\xf4\x90\x80\x80", "0,4") "}", 4 },
        { false, "{" ENTRY("\xe2\x82", "0,4") "}", 4 }, { true, "{" ENTRY("\xf4\x8f\xbf\xbf", "0,4") "}", 4 },
        { true, "{" ENTRY("\xc3\xa9\xe2\x82\xac", "0,4") "}", 4 }, { false, "{" ENTRY("\\ud800", "0,4") "}", 4 },
        { false, "{" ENTRY("\\udc00", "0,4") "}", 4 }, { false, "{" ENTRY("\\ud800\\u0041", "0,4") "}", 4 },
        { true, "{" ENTRY("\\ud83d\\ude00", "0,4") "}", 4 }, { false, "{" ENTRY("\x01", "0,4") "}", 4 },
        { false, "{" ENTRY("a", "0,4") ",}", 4 }, { false, "{" ENTRY("a", "0,4") "}}", 4 },
        { false, "[]", 0 }, { false, "{" ENTRY("a", "0,4") "}", 5 }, { false, "{" ENTRY("a", "0,4") "}", 3 } };
    static char bytes[1 << 12];
    hpml_ctx   *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1 });
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        size_t length = strlen(cases[i].header);
        memset(bytes, 0, sizeof bytes);
        bytes[0] = (char)(length & 255), bytes[1] = (char)(length >> 8);
        memcpy(bytes + 8, cases[i].header, length);
        hpml_safetensors *f = hpml_safetensors_open(ctx, put("header", bytes, 8 + length + cases[i].data));
        if ((f != NULL) != cases[i].good) printf("    %s\n", cases[i].header);
        ENSURE((f != NULL) == cases[i].good);
        if (i == 11) ENSURE(strcmp(hpml_safetensors_meta(f, "k"), "w") == 0); /* of two the last one counts */
        hpml_ctx_clear_error(ctx);
    }
    for (int depth = 125; depth <= 126; depth++) { /* brackets in brackets, with those around them 128 */
        char open[127], close[127];
        memset(open, '[', sizeof open), memset(close, ']', sizeof close);
        int n = snprintf(bytes + 8, sizeof bytes - 8, "{\"a\":{\"more\":%.*s%.*s,\"dtype\":\"F32\",\"shape\":[1],"
                         "\"data_offsets\":[0,4]}}", depth, open, depth, close);
        bytes[0] = (char)(n & 255), bytes[1] = (char)(n >> 8);
        memset(bytes + 8 + n, 0, 4);
        hpml_safetensors *f = hpml_safetensors_open(ctx, put("header", bytes, (size_t)n + 12));
        ENSURE((f != NULL) == (depth == 125));
        hpml_ctx_clear_error(ctx);
    }
    hpml_ctx_free(ctx);
}

TEST(names_that_would_make_a_file_unreadable)
{
    hpml_ctx       *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1 });
    float           v = 1;
    hpml_safetensor e = { "w\xff", HPML_DTYPE_F32, 1, { 1 }, &v, 4 };
    hpml_meta       meta[2] = { { "a", "1" }, { "a", "2" } };
    ENSURE_ERROR(ctx, hpml_safetensors_save(ctx, file("u"), &e, 1, NULL, 0), HPML_ERR_ARGUMENT, "it is not UTF-8");
    e.name = "w";
    ENSURE_ERROR(ctx, hpml_safetensors_save(ctx, file("u"), &e, 1, meta, 2), HPML_ERR_ARGUMENT,
                 "metadata cannot be called \"a\": the name is used twice");
    meta[1].key = "\x80";
    ENSURE_ERROR(ctx, hpml_safetensors_save(ctx, file("u"), &e, 1, meta, 2), HPML_ERR_ARGUMENT, "it is not UTF-8");
    meta[1].key = "b", meta[1].value = "\xc3";
    ENSURE_ERROR(ctx, hpml_safetensors_save(ctx, file("u"), &e, 1, meta, 2), HPML_ERR_ARGUMENT,
                 "the value of metadata \"b\" is not UTF-8");
    ENSURE_ERROR(ctx, hpml_safetensors_save(ctx, file("u"), NULL, 1, NULL, 0), HPML_ERR_ARGUMENT, "1 tensors");
    ENSURE_ERROR(ctx, hpml_safetensors_save(ctx, file("u"), &e, 1, NULL, 2), HPML_ERR_ARGUMENT, "2 pairs of metadata");
    ENSURE(access(file("u"), F_OK) != 0);
    hpml_ctx_free(ctx);
}

/* A reader takes at most four times the bytes of a file, unpacked, and 1 MB, whatever is in it. */
static bool frugal(int kind, const char *path, size_t unpacked, bool good)
{
    meter         m   = { 0 };
    hpml_ctx_desc d   = { .threads = 1, .allocator = { meter_alloc, meter_free, &m } };
    hpml_ctx     *ctx = hpml_ctx_create(&d);
    size_t        before = m.live;
    m.peak = m.live;
    bool read = read_any(NULL, ctx, kind, path);
    if (read != good || m.peak - before > 4 * unpacked + (1 << 20))
        printf("    kind %d: %zu bytes for %zu; %s\n", kind, m.peak - before, unpacked, hpml_ctx_error(ctx));
    bool fine = read == good && m.peak - before <= 4 * unpacked + (1 << 20);
    hpml_ctx_free(ctx);
    return fine;
}

/* A file of `size` bytes: `head`, then `unit` over and over. */
static const char *put_many(const char *name, const char *head, const char *unit, size_t size)
{
    char  *all = (char *)malloc(size);
    size_t at  = strlen(head);
    memcpy(all, head, at);
    for (size_t n = strlen(unit); at < size; at++) all[at] = unit[(at - strlen(head)) % n];
    put(name, all, size);
    free(all);
    return file(name);
}

TEST(memory_for_a_file_is_bounded)
{
    enum { SIZE = 4000000 };
    ENSURE(frugal(READ_CSV, put_many("big", "", "1,2\n", SIZE), SIZE, true));
    ENSURE(frugal(READ_CSV, put_many("big", "1,1,0\n", "\n", SIZE), SIZE, true));
    ENSURE(frugal(READ_CSV, put_many("big", "1,0\n", ",\n", SIZE), SIZE, false));
    ENSURE(frugal(READ_CSV, put_many("big", "", ",", SIZE), SIZE, false));
    ENSURE(frugal(READ_CSV, put_many("big", "1", ",1", SIZE - 1), SIZE - 1, true));
    ENSURE(frugal(READ_TEXT, put_many("big", "", "some text. ", SIZE), SIZE, true));
    static char wide[200000];
    for (int i = 0; i < 100000; i++) wide[i] = i % 2 ? ',' : '1';
    wide[99999] = '\n';
    memset(wide + 100000, '\n', 100000);
    ENSURE(frugal(READ_CSV, put("big", wide, sizeof wide), sizeof wide, true));
    char head[16] = { 0 };
    put_many("json", "........{\"__metadata__\":{", "\"\":\"\",", SIZE - 1);
    for (int i = 0; i < 3; i++) head[i] = (char)((SIZE - 9) >> 8 * i & 255);
    FILE *f = fopen(file("json"), "r+b");
    ENSURE(f && fwrite(head, 1, 8, f) == 8 && fclose(f) == 0);
    for (int kind = READ_PARAMS; kind < READERS; kind++)
        if (kind != READ_CHECKPOINT && kind != MAP_RECORDS) ENSURE(frugal(kind, file("json"), SIZE, false));
    put_many("json", "........{", "\"\":[\"U8\",[],[0,1]],", SIZE - 1);
    f = fopen(file("json"), "r+b");
    ENSURE(f && fwrite(head, 1, 8, f) == 8 && fclose(f) == 0 && frugal(MAP_SAFETENSORS, file("json"), SIZE, false));
    f = fopen(file("sparse"), "wb"); /* huge, and wrong from its first byte on */
    ENSURE(f && ftruncate(fileno(f), (off_t)1 << 36) == 0 && fclose(f) == 0);
    for (int kind = 0; kind < READERS; kind++)
        if (kind == READ_IDX || kind == READ_NPY) ENSURE(frugal(kind, file("sparse"), 0, false));
}

TEST(gzip_is_judged_by_its_header)
{
#ifdef HPML_USE_ZLIB
    static unsigned char bytes[1 << 20] = { 0, 0, 8, 3, 0, 1, 0, 0, 0, 0, 0, 4, 0, 0, 0, 4 };
    static unsigned char labels[8 + 65536] = { 0, 0, 8, 1, 0, 1, 0, 0 };
    for (int kind = 0; kind < 3; kind++) { /* not IDX, a promise that is not kept, and 65536 images of 4 x 4 */
        gzFile gz = gzopen(file("gz"), "wb1");
        bytes[0] = kind == 0, bytes[4] = kind == 1 ? 255 : 0;
        for (int i = 0; gz && i < (kind == 0 ? 64 : 1); i++) gzwrite(gz, bytes, sizeof bytes);
        if (kind == 2) gzwrite(gz, bytes, 16);
        ENSURE(gz && gzclose(gz) == Z_OK);
        put("l", labels, sizeof labels);
        ENSURE(frugal(READ_IDX, file("gz"), kind == 0 ? 16 : 1 << 20, kind == 2));
    }
    hpml_ctx *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1 });
    gzFile    gz  = gzopen(file("gz"), "wb1");
    gzwrite(gz, bytes, sizeof bytes), gzwrite(gz, bytes, 17), gzclose(gz);
    ENSURE_ERROR(ctx, !hpml_dataset_load_idx(ctx, file("gz"), file("l")), HPML_ERR_FORMAT,
                 "promises 1048576 bytes of data, the file has more than 1048576");
    hpml_ctx_free(ctx);
#else
    SKIP("built without zlib");
#endif
}

TEST(npy_versions)
{
    static const char text[] = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }";
    hpml_ctx *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1 });
    for (int version = 1; version <= 4; version++) {
        char   b[200] = "\x93NUMPY";
        size_t front  = version == 1 ? 10 : 12;
        float  x[2]   = { 1.5f, (float)version };
        b[6] = (char)version, b[8] = 100;
        memset(b + front, ' ', 100), memcpy(b + front, text, sizeof text - 1), memcpy(b + front + 100, x, 8);
        hpml_tensor *t = hpml_npy_load(ctx, put("v.npy", b, front + 108));
        if (version < 4) ENSURE(t && t->data[0] == 1.5f && t->data[1] == (float)version);
        else ENSURE_ERROR(ctx, !t, HPML_ERR_FORMAT, "version 1, 2 or 3");
    }
    hpml_ctx_free(ctx);
}

static float csv_number(hpml_ctx *ctx, const char *text)
{
    hpml_dataset *d = hpml_dataset_load_csv(ctx, put("number", text, strlen(text)), HPML_NO_LABEL, false);
    float         v = d ? *(const float *)d->x : NAN;
    hpml_dataset_free(d);
    return v;
}

/* The nearest float, as libc's strtof finds it: numbers of many forms, and those around the middle of two floats. */
TEST(csv_numbers_are_rounded_correctly)
{
    hpml_ctx *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1 });
    hpml_rng  rng = { .seed = 7 };
    char      text[400], digit;
    for (int i = 0; i < (SLOW_BUILD ? 4000 : 12000); i++) {
        uint32_t word = hpml_rng_u32(&rng) & 0x7fffffff;
        float    a, b;
        if (word >= 0x7f7fffff) continue;
        if (i % 5 == 0) word &= 0xffffff; /* denormal, mostly */
        memcpy(&a, &word, 4);
        b = nextafterf(a, INFINITY);
        if (i % 4 == 0) snprintf(text, sizeof text, "%.*g", 1 + i % 20, (double)a);
        else if (i % 4 == 1) snprintf(text, sizeof text, "%.*e", i % 40, (double)a * 1.1);
        else snprintf(text, sizeof text, "%.*e", 120, ((double)a + (double)b) / 2); /* exactly the middle */
        if (i % 4 == 3) { /* next to it */
            char *last = strchr(text, 'e') - 1 - i % 3;
            digit = *last, *last = digit == '9' ? '8' : (char)(digit + 1);
        }
        if (isinf(strtof(text, NULL))) continue; /* refused */
        if (csv_number(ctx, text) != strtof(text, NULL))
            printf("    %s: %.9g, not %.9g\n", text, (double)csv_number(ctx, text), (double)strtof(text, NULL));
        ENSURE(csv_number(ctx, text) == strtof(text, NULL));
    }
    ENSURE(csv_number(ctx, "16777217") == 16777216.0f && csv_number(ctx, "16777219.0") == 16777220.0f);
    ENSURE(csv_number(ctx, "340282356779733661637539395458142568447.9") == FLT_MAX);
    ENSURE(isnan(csv_number(ctx, "340282356779733661637539395458142568448"))); /* rounds to infinity: refused */
    hpml_ctx_clear_error(ctx);
    ENSURE(csv_number(ctx, "-0") == 0 && csv_number(ctx, "1e-99999999999999999999") == 0);
    memset(text, '0', 300), strcpy(text + 300, "1e299"), text[1] = '.';
    ENSURE(csv_number(ctx, text) == 1);
    hpml_ctx_free(ctx);
}

TEST(csv_lines_are_not_lost)
{
    static const struct { const char *text, *says; } bad[] = {
        { "1,2,x\n1,2,3\n", "line 1, column 3: \"x\" is not a number; a header has none in any field" },
        { "1,NaN,0\n1,2,3\n", "line 1, column 2: \"NaN\" is not a number" },
        { "nan,-inf\n1,2\n", "line 1, column 1: \"nan\" is not" },
        { "age,,label\n1,2,3\n4,,6\n", "line 3, column 2: \"\" is not a number" },
        { "id,\"age, years\",y\n1,old,3\n", "line 2, column 2 \"age, years\": \"old\" is not a number" },
        { "id,age,y\n1,2,3\n\n1,2,2.5\n", "line 4, column 3 \"y\": \"2.5\" is not a whole number from 0" },
        { "id,age,y\n1,2,-1\n", "line 2, column 3 \"y\": \"-1\" is not a whole number" },
        { "id;age\n1;1e39\n", "line 2, column 2 \"age\": \"1e39\" is not within what f32 holds" },
        { "id,age,y\n1,2\n", "line 2: 2 fields, expected 3 as on the first line" },
        { "1,2\n1,2,3\n", "line 2: 3 fields, expected 2" }, { "a,b\n", "no line of numbers" },
        { "\n\n", "no line of numbers" } };
    hpml_ctx *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1 });
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        hpml_dataset *d = hpml_dataset_load_csv(ctx, put("lines", bad[i].text, strlen(bad[i].text)), -1, false);
        ENSURE(!d && (hpml_ctx_status(ctx) == HPML_ERR_FORMAT || hpml_ctx_status(ctx) == HPML_ERR_LABEL));
        ENSURE_ERROR(ctx, !d, hpml_ctx_status(ctx), bad[i].says);
    }
    const char *good = "\"a, \"\"quoted\"\"\" ,\tb\r\n\"1\" ,2\r\n3, \"4\"";
    hpml_dataset *d = hpml_dataset_load_csv(ctx, put("lines", good, strlen(good)), -1, false);
    ENSURE(d && d->count == 2 && ((const float *)d->x)[1] == 3 && ((const int32_t *)d->y)[1] == 4);
    hpml_ctx_free(ctx);
}
