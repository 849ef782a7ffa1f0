/* What the main job is asked for, and its data: MNIST's files from a folder, or digits drawn by digits.h. */
#ifndef HPML_MNIST_H
#define HPML_MNIST_H

#include "digits.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct options {
    const char *data, *model, *layout, *codec, *allreduce, *transport, *network, *save, *load;
    int64_t     samples, batch, epochs, stop, workers, threads, seed, table, workspace;
    double      lr;
    int         json, exact, compare;
} options;

static const char usage[] =
    "--model linear|mlp|cnn    what to train (cnn)\n"
    "--layout nchw|nhwc        how the cnn keeps images (nchw)\n"
    "--workspace KB            what a convolution may take beyond inputs and results (0: no limit)\n"
    "--data DIR                MNIST's IDX files, gzipped or not (drawn digits)\n"
    "--samples N               digits to draw (12000)\n"
    "--epochs N                passes over the data (files 6, drawn 3)\n"
    "--stop N                  leave after pass N of the --epochs\n"
    "--batch N                 samples of a step, on all workers together (64)\n"
    "--lr X                    learning rate (cnn 0.03, else 0.05)\n"
    "--seed N                  of everything random (1)\n"
    "--workers N               data-parallel workers (1)\n"
    "--threads N               threads of a worker (the cores shared out)\n"
    "--transport threads|mpi   how workers talk; with mpi start the program by mpiexec\n"
    "--codec none|bf16|onebit|twobit   how gradients travel (onebit)\n"
    "--allreduce auto|central|tree|ring|butterfly|halving|hierarchical|native\n"
    "--network 1gbit|100mbit   slow the threads' messages down to this, each worker on a machine of its own\n"
    "--exact                   the same bits for every number of workers, algorithm and transport\n"
    "--save FILE, --load FILE  a checkpoint\n"
    "--steps-table N           where the time of the last N steps went, on each worker\n"
    "--compare                 1 worker, 4 workers, 4 workers with 1 bit; also on slow networks\n"
    "--json                    a JSON object as last line\n";

/* Words and numbers into the options; 0, or 1: --help was answered, or 2: there is no such option. */
static int parse_words(options *o, int argc, char **argv)
{
    enum { TEXT, COUNT, REAL, FLAG };
    const struct { const char *name; int kind; void *to; } table[] = {
        { "--data", TEXT, &o->data }, { "--model", TEXT, &o->model }, { "--codec", TEXT, &o->codec },
        { "--layout", TEXT, &o->layout }, { "--workspace", COUNT, &o->workspace },
        { "--allreduce", TEXT, &o->allreduce }, { "--transport", TEXT, &o->transport },
        { "--network", TEXT, &o->network }, { "--save", TEXT, &o->save }, { "--load", TEXT, &o->load },
        { "--samples", COUNT, &o->samples }, { "--batch", COUNT, &o->batch }, { "--epochs", COUNT, &o->epochs },
        { "--stop", COUNT, &o->stop }, { "--workers", COUNT, &o->workers }, { "--threads", COUNT, &o->threads },
        { "--seed", COUNT, &o->seed }, { "--steps-table", COUNT, &o->table }, { "--lr", REAL, &o->lr },
        { "--json", FLAG, &o->json }, { "--exact", FLAG, &o->exact }, { "--compare", FLAG, &o->compare } };
    for (int i = 1; i < argc; i++) {
        size_t k = 0, n = sizeof table / sizeof table[0];
        if (strcmp(argv[i], "--help") == 0) return printf("%s", usage), 1;
        while (k < n && strcmp(table[k].name, argv[i]) != 0) k++;
        if (k == n || (table[k].kind != FLAG && i + 1 == argc))
            return fprintf(stderr, "unknown or incomplete option %s\n%s", argv[i], usage), 2;
        if (table[k].kind == FLAG) { *(int *)table[k].to = 1; continue; }
        const char *word = argv[++i];
        char       *end  = NULL;
        double      real = strtod(word, &end);
        if (table[k].kind == COUNT) *(int64_t *)table[k].to = strtoll(word, &end, 10);
        if (table[k].kind == TEXT) *(const char **)table[k].to = word;
        else if (*end || end == word || !(real >= 0))
            return fprintf(stderr, "%s %s: expected a number from 0\n", argv[i - 1], word), 2;
        if (table[k].kind == REAL) *(double *)table[k].to = real;
    }
    return 0;
}

/* 0: go on; 1: --help was answered; 2: an option that is none, or has a value that it cannot have. */
static int parse(options *o, int argc, char **argv)
{
    int failed = parse_words(o, argc, argv);
    if (failed) return failed;
    if (o->epochs == 0) o->epochs = o->data ? 6 : 3;
    if (o->lr == 0) o->lr = strcmp(o->model, "cnn") == 0 ? 0.03 : 0.05;
    if (o->stop == 0 || o->stop > o->epochs) o->stop = o->epochs;
    const struct { const char *option, *value, *allowed; } choice[] = {
        { "--model", o->model, " linear mlp cnn " }, { "--layout", o->layout, " nchw nhwc " },
        { "--codec", o->codec, " none bf16 onebit twobit " },
        { "--transport", o->transport, " threads mpi " }, { "--network", o->network, " 1gbit 100mbit " },
        { "--allreduce", o->allreduce, " auto central tree ring butterfly halving hierarchical native " } };
    for (size_t k = 0; k < sizeof choice / sizeof choice[0]; k++) {
        const char *value = choice[k].value;
        char        word[64];
        snprintf(word, sizeof word, " %s ", value ? value : "");
        if (value && !strstr(choice[k].allowed, word))
            return fprintf(stderr, "%s %s: expected one of%s\n", choice[k].option, value, choice[k].allowed), 2;
    }
    if (o->table > 100000)
        return fprintf(stderr, "--steps-table %lld: expected 0 to 100000\n", (long long)o->table), 2;
    if (o->workers >= 1 && o->batch >= o->workers && o->samples >= 1) return 0;
    return fprintf(stderr, "--workers %lld, --batch %lld: a worker needs a sample of each batch\n",
                   (long long)o->workers, (long long)o->batch), 2;
}

/* The IDX pair `name` of a folder, plain or gzipped; NULL when it is not there. */
static hpml_dataset *load_pair(hpml_ctx *ctx, const char *dir, const char *name)
{
    char images[1024], labels[1024];
    for (int gz = 0; gz < 2; gz++) {
        snprintf(images, sizeof images, "%s/%s-images-idx3-ubyte%s", dir, name, gz ? ".gz" : "");
        snprintf(labels, sizeof labels, "%s/%s-labels-idx1-ubyte%s", dir, name, gz ? ".gz" : "");
        if (access(images, R_OK) == 0) return hpml_dataset_load_idx(ctx, images, labels);
    }
    return NULL;
}

static hpml_dataset *draw_digits(hpml_ctx *ctx, uint64_t seed, int64_t first, int64_t count)
{
    const int64_t  shape[3] = { 1, 28, 28 };
    unsigned char *images = (unsigned char *)malloc((size_t)count * 785);
    unsigned char *labels = images ? images + count * 784 : NULL;
    int32_t       *y      = (int32_t *)malloc((size_t)count * sizeof *y);
    hpml_dataset  *d      = NULL;
    if (images && y) {
        digits_fill(seed, first, count, images, labels);
        for (int64_t i = 0; i < count; i++) y[i] = labels[i];
        d = hpml_dataset_create(ctx, count, HPML_DTYPE_U8, 3, shape, images, HPML_DTYPE_I32, 1, y);
    }
    free(images);
    free(y);
    return d;
}

static int load_data(hpml_ctx *ctx, const options *o, hpml_dataset **train, hpml_dataset **test)
{
    if (!o->data) {
        *train = draw_digits(ctx, 1, 0, o->samples);
        *test  = draw_digits(ctx, 1, 1000000000, 2000);
        return *train && *test;
    }
    *train = load_pair(ctx, o->data, "train");
    *test  = load_pair(ctx, o->data, "t10k");
    if (*test && !*train && hpml_ctx_status(ctx) == HPML_OK && (*test)->count > 2000) {
        hpml_dataset *all = *test;
        *train = hpml_dataset_slice(all, 0, all->count - 2000);
        *test  = hpml_dataset_slice(all, all->count - 2000, 2000);
    }
    if (!*test && hpml_ctx_status(ctx) == HPML_OK)
        fprintf(stderr, "%s: no t10k-images-idx3-ubyte[.gz] in this folder\n", o->data);
    else if (!*train && hpml_ctx_status(ctx) == HPML_OK)
        fprintf(stderr, "%s: no train-images-idx3-ubyte[.gz] in this folder, and no more than 2,000 digits to test\n",
                o->data);
    return *train && *test;
}

#endif
