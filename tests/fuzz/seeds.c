/* seeds            runs every fuzz target on its seeds, and on seeds cut short and with some bits changed
   seeds FOLDER     writes the seeds to FOLDER/TARGET/, where a fuzzer begins
   seeds TARGET FILE...   runs a target on files: what a fuzzer has found, once more */
#include "fuzz.h"
#include "../npz_files.h"

#include "../../hpml.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static unsigned char input[1 << 16]; /* the seed that is being made */
static size_t        size;
static const char   *folder;         /* NULL: seeds are run */
static int           made;

static void add(const void *bytes, size_t n)
{
    memcpy(input + size, bytes, n);
    size += n;
}

static void text(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    size += (size_t)vsnprintf((char *)input + size, sizeof input - size, format, args);
    va_end(args);
}

static void big(uint64_t x, int bytes) { while (bytes-- > 0) input[size++] = (unsigned char)(x >> 8 * bytes); }
static void many(int n) { for (int i = 0; i < n; i++) input[size++] = (unsigned char)i; }

static void little(uint64_t x, int bytes)
{
    for (int i = 0; i < bytes; i++) input[size++] = (unsigned char)(x >> 8 * i);
}

/* Writes the finished seed, or runs its target on the seed and on changed copies. */
static void seed(int target)
{
    static unsigned char changed[sizeof input];
    hpml_rng rng = { .seed = (uint64_t)++made };
    size_t   n   = size;
    size = 0;
    if (folder) {
        char path[512];
        snprintf(path, sizeof path, "%s/%s", folder, fuzz_names[target]);
        mkdir(path, 0777);
        snprintf(path, sizeof path, "%s/%s/seed%03d", folder, fuzz_names[target], made);
        FILE *f = fopen(path, "wb");
        if (!f || fwrite(input, 1, n, f) != n || fclose(f) != 0) exit(1);
        return;
    }
    fuzz_one(target, input, n);
    for (int round = 0; round < 160; round++) {
        memcpy(changed, input, n);
        for (int k = 0; k < 1 + round % 4; k++) {
            int64_t at = hpml_rng_below(&rng, round % 2 || n < 64 ? (int64_t)n : 64);
            changed[at] ^= (unsigned char)(1 << hpml_rng_below(&rng, 8));
        }
        fuzz_one(target, changed, round % 8 == 0 ? n * (size_t)round / 160 : n);
    }
}

static void idx(int images, int height, int width, int labels, int packing, int target)
{
    big((uint64_t)(16 + images * height * width), 2), big((uint64_t)packing, 1);
    big(0x803, 4), big((uint64_t)images, 4), big((uint64_t)height, 4), big((uint64_t)width, 4);
    many(images * height * width);
    big(0x801, 4), big((uint64_t)labels, 4);
    many(labels);
    seed(target);
}

static void idx_and_cifar(void)
{
    static const int packings[] = { 0, 1, 2, 3, 7, 11 };
    idx(4, 3, 2, 4, 0, FUZZ_IDX), idx(4, 3, 2, 3, 0, FUZZ_IDX), idx(1, 1, 1, 1, 0, FUZZ_IDX);
    for (int i = 0; i < 6; i++) idx(4, 3, 2, 4, packings[i], FUZZ_GZIP);
    for (int n = 1; n <= 3; n++) {
        little((uint64_t)n - 1, 1);
        for (int r = 0; r < n; r++) little(3, 1), many(3072);
        seed(FUZZ_CIFAR);
    }
}

static void csv_and_text(void)
{
    static const char *const lines[] = {
        "1,2,3\n4,5,6\n", "a,b,c\n1,2.5,0\n3e2,-4.,1\n", "\"1\";\"2\";\"0\"\r\n\"3\";\"4\";\"1\"\r\n",
        "\xef\xbb\xbfx\ty\n1\t2\n", "1e308,1e-400,0.00000000000000000000001\n", "1,2,0\n\n\n1,2,1", "nan,inf,1\n",
        "+1, 2 ,3\r\n", "16777217,3.4028235677973366e38,7.006492321624085354618e-46\n",
        "\"a,b\",\"c \"\"d\"\"\"\n1,2\n", "1.00000005960464477539062500000000000000000000000000000001,0\n" };
    static const int labels[] = { 0, 255, 100 };
    for (int i = 0; i < 11; i++)
        for (int k = 0; k < 3; k++) {
            little((uint64_t)labels[k], 1), little((uint64_t)i & 1, 1), text("%s", lines[i]);
            seed(FUZZ_CSV);
        }
    little(4, 1), little(8, 1), add("hello world, some text\n\xff\0abc", 28), seed(FUZZ_TEXT);
    little(5, 1), little(0, 1), text("abcdefghijkl"), seed(FUZZ_TEXT);
}

static void npy(int version, const char *type, const char *order, const char *shape, int bytes)
{
    add("\x93NUMPY", 6), little((uint64_t)version, 2);
    size_t at = size, front = version == 1 ? 2 : 4;
    size += front;
    text("{'descr': '%s', 'fortran_order': %s, 'shape': %s, }", type, order, shape);
    while (size % 64 != 63) text(" ");
    text("\n");
    size_t end = size;
    size = at, little(end - at - front, (int)front), size = end;
    many(bytes);
    seed(FUZZ_NPY);
}

static void npy_and_records(void)
{
    static const struct { const char *name; int bytes; } types[] = {
        { "<f4", 4 }, { "<f2", 2 }, { "<i4", 4 }, { "|u1", 1 }, { "<f8", 8 }, { "<i8", 8 }, { ">f4", 4 } };
    for (int i = 0; i < 7; i++) {
        npy(1, types[i].name, "False", "(2, 3)", 6 * types[i].bytes);
        npy(1 + i % 3, types[i].name, "False", "()", types[i].bytes);
    }
    npy(2, "<f4", "False", "(2,)", 8), npy(3, "<f4", "False", "(2,)", 8), npy(1, "<f4", "True", "(2, 3)", 24);
    npy(1, "<f4", "False", "(4611686018427387904, 4)", 0);
    add("HPMLREC1", 8), little(2, 8), little(31, 8), text("abcdefg"), little(24, 8), little(27, 8), little(31, 8);
    seed(FUZZ_RECORDS);
    static const int64_t heads[][10] = { { 4, 3, 1, 2, 2, 1, 1, 3, 1, 10 }, { 0, 1, 2, 1, 1, 1, 1, 0, 2, 0 },
                                         { 3, 0, 1, 1, 1, 1, 1, 3, 0, 0 } };
    static const int     bytes[] = { 8, 16, 4 };
    for (int i = 0; i < 3; i++) {
        uint64_t at = 24;
        add("HPMLREC1", 8), little(3, 8), little(24 + 80 + 2 * (uint64_t)bytes[i], 8);
        add(heads[i], 80), many(bytes[i]), many(bytes[i]);
        for (int r = 0; r < 4; r++) little(at, 8), at += r ? (uint64_t)bytes[i] : 80;
        seed(FUZZ_RECORDS);
    }
}

static void safetensors(const char *header, int data)
{
    little(strlen(header), 8), text("%s", header), many(data);
    seed(FUZZ_SAFETENSORS);
}

/* A checkpoint or parameters of the targets' model, without checksums, which would hide all that follows them. */
static void trained(int target, const char *step, float fill)
{
    static const struct { const char *name; int rows, columns; } params[] = {
        { "fc.weight", 2, 3 }, { "fc.bias", 2, 0 }, { "bn.weight", 2, 0 }, { "bn.bias", 2, 0 },
        { "bn.running_mean", 2, 0 }, { "bn.running_var", 2, 0 }, { "linear1.weight", 2, 2 }, { "linear1.bias", 2, 0 } };
    static const char *const kinds[] = { "", "opt.mean.", "opt.square_mean." };
    int at = 0;
    little(0, 8);
    text("{\"__metadata__\":{\"hpml.seed\":\"0\",\"hpml.step\":\"%s\",\"hpml.epoch\":\"0\",\"hpml.epoch_step\":\"0\","
         "\"hpml.optimizer\":\"adam\",\"hpml.loss_scale\":\"1\",\"hpml.scale_steps\":\"-1\"}", step);
    for (int kind = 0; kind < (target == FUZZ_CHECKPOINT ? 3 : 1); kind++)
        for (int i = 0; i < 8; i++) {
            int bytes = 4 * params[i].rows * (params[i].columns ? params[i].columns : 1);
            if (kind > 0 && strstr(params[i].name, "running")) continue;
            text(",\"%s%s\":{\"dtype\":\"F32\",\"shape\":[%d", kinds[kind], params[i].name, params[i].rows);
            if (params[i].columns) text(",%d", params[i].columns);
            text("],\"data_offsets\":[%d,%d]}", at, at + bytes);
            at += bytes;
        }
    text("}");
    size_t end = size;
    size = 0, little(end - 8, 8), size = end;
    for (; at > 0; at -= 4) add(&fill, 4);
    seed(target);
}

static void tensors(void)
{
    safetensors("{\"__metadata__\":{\"format\":\"pt\",\"hpml.step\":\"7\"},\"w\":{\"dtype\":\"F32\",\"shape\":[2,3],"
                "\"data_offsets\":[0,24]},\"b\":{\"dtype\":\"BF16\",\"shape\":[3],\"data_offsets\":[24,30]}}", 30);
    safetensors(" {\"w\xc3\xa9\\n\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4],"
                "\"x\":[{\"y\":-1.5e3},null]},"
                "\"x\":{\"dtype\":\"I64\",\"shape\":[1],\"data_offsets\":[4,12]},"
                "\"e\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[12,12]}}   ", 12);
    safetensors("{}", 0), safetensors("{\"__metadata__\":null,\"a\":[\"F32\",[1],[0,4]]}", 4);
    safetensors("{\"\\ud83d\\ude00\":{\"shape\":[],\"dtype\":\"I32\",\"data_offsets\":[0,4]}}", 4);
    safetensors("{\"w\":{\"dtype\":\"F16\",\"shape\":[1,1,1,1,1,1,1],\"data_offsets\":[0,2]}}", 2);
    safetensors("{\"a\":{\"dtype\":\"U8\",\"shape\":[9],\"data_offsets\":[7,9]},"
                "\"a\":{\"dtype\":\"F4\",\"shape\":[8],\"data_offsets\":[0,4]}}", 4);
    for (int target = FUZZ_CHECKPOINT; target <= FUZZ_PARAMS; target++) {
        trained(target, "7", 1), trained(target, "9223372036854775807", 1), trained(target, "9007199254740992", 0.5f);
        trained(target, "1", -1), trained(target, "1", 3e38f), trained(target, "1", 0);
    }
}

static void archives(void)
{
    add(npz_stored, sizeof npz_stored), seed(FUZZ_NPZ);
    add(npz_packed, sizeof npz_packed), seed(FUZZ_NPZ);
    static const char *const names[] = { "a.npy", "a.cls", "b.bin", "b.y.npy" };
    for (int first = 0; first < 4; first += 2) {
        for (int i = first; i < first + 2; i++) {
            size_t   at = size;
            unsigned sum = 0;
            memset(input + at, 0, 1024);
            snprintf((char *)input + at, 100, "%s", names[i]);
            snprintf((char *)input + at + 124, 12, "%011o", i == 1 ? 1u : 100u);
            memset(input + at + 148, ' ', 8);
            for (int k = 0; k < 512; k++) sum += input[at + (size_t)k];
            snprintf((char *)input + at + 148, 8, "%06o", sum);
            size += 512;
            if (i == 1) text("7"); else add(npz_stored + 55, 100); /* the head of a .npy file */
            size = at + 1024;
        }
        seed(FUZZ_TAR);
    }
}

int main(int argc, char **argv)
{
    int target = -1;
    for (int i = 0; i < FUZZ_TARGETS && argc > 2; i++)
        if (strcmp(argv[1], fuzz_names[i]) == 0) target = i;
    for (int i = 2; i < argc && target >= 0; i++) {
        FILE *f = fopen(argv[i], "rb");
        if (!f) return 1;
        size = fread(input, 1, sizeof input, f);
        fclose(f);
        fuzz_one(target, input, size);
    }
    if (argc > 2) return target < 0;
    folder = argc > 1 ? argv[1] : NULL;
    idx_and_cifar();
    csv_and_text();
    npy_and_records();
    archives();
    tensors();
    printf("%d passed, 0 failed, 0 skipped\n", made); /* what is wrong aborts */
    return 0;
}
