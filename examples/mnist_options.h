/* What the main job is asked for, and its data: MNIST's files from a folder, or digits drawn by digits.h. */
#ifndef HPML_MNIST_OPTIONS_H
#define HPML_MNIST_OPTIONS_H

#include "digits.h"
#include "options.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Ctrl-C, for hpml_fit_desc.stop. */
static volatile int interrupted __attribute__((unused));
static inline void interrupt(int signal_number) { interrupted = signal_number; }

typedef struct options {
    const char *data, *model, *layout, *precision, *codec, *allreduce, *transport, *network, *save, *load, *out;
    const char *checkpoint;
    int64_t     samples, batch, epochs, stop, workers, threads, seed, table, workspace;
    double      lr;
    int         json, exact, compare;
} options;

/* Sets defaults that depend on other options. */
static void defaults(options *o)
{
    if (o->epochs == 0) o->epochs = o->data ? 6 : 3;
    if (!o->codec) o->codec = strcmp(o->precision, "f16") == 0 ? "none" : "onebit"; /* 1 bit cannot hold an overflow */
    if (o->lr == 0) o->lr = strcmp(o->model, "cnn") == 0 ? 0.03 : 0.05;
    if (o->stop == 0 || o->stop > o->epochs) o->stop = o->epochs;
}

/* Reads the command line: the options below and the `extra` ones of a program of its own. 0: go on; 1: --help was
   answered; 2: a message says which option is wrong. */
static int parse(options *o, const option *extra, int extra_count, int argc, char **argv)
{
    const option common[] = {
        { "--model", OPTION_CHOICE, &o->model, "linear|mlp|cnn", "what to train (cnn)" },
        { "--layout", OPTION_CHOICE, &o->layout, "nchw|nhwc", "how the cnn keeps images (nchw)" },
        { "--workspace", OPTION_COUNT, &o->workspace, "KB", "memory of a convolution beyond x and y (no limit)" },
        { "--data", OPTION_TEXT, &o->data, "DIR", "MNIST's IDX files, gzipped or not (drawn digits)" },
        { "--samples", OPTION_COUNT, &o->samples, "N", "digits to draw (12000)" },
        { "--epochs", OPTION_COUNT, &o->epochs, "N", "passes over the data (files 6, drawn 3)" },
        { "--stop", OPTION_COUNT, &o->stop, "N", "leave after pass N of the --epochs" },
        { "--batch", OPTION_COUNT, &o->batch, "N", "samples of a step, on all workers together (64)" },
        { "--lr", OPTION_REAL, &o->lr, "X", "learning rate (cnn 0.03, else 0.05)" },
        { "--seed", OPTION_COUNT, &o->seed, "N", "of everything random (1)" },
        { "--workers", OPTION_COUNT, &o->workers, "N", "data-parallel workers (1)" },
        { "--threads", OPTION_COUNT, &o->threads, "N", "threads of a worker (the cores shared out)" },
        { "--transport", OPTION_CHOICE, &o->transport, "threads|mpi",
          "how workers exchange messages; mpi needs mpiexec" },
        { "--codec", OPTION_CHOICE, &o->codec, "none|bf16|onebit|twobit|topk|lowrank",
          "how gradients travel (onebit; in f16 none)" },
        { "--allreduce", OPTION_CHOICE, &o->allreduce,
          "auto|central|tree|ring|butterfly|halving|hierarchical|native|pairwise",
          "how gradients are added up (auto)" },
        { "--network", OPTION_CHOICE, &o->network, "1gbit|100mbit",
          "delays messages between threads as this network would" },
        { "--exact", OPTION_FLAG, &o->exact, NULL, "the same bits for every number of workers" },
        { "--save", OPTION_TEXT, &o->save, "FILE", "writes a checkpoint at the end" },
        { "--load", OPTION_TEXT, &o->load, "FILE", "goes on from a checkpoint" },
        { "--checkpoint", OPTION_TEXT, &o->checkpoint, "FILE", "saved each pass and on Ctrl-C; goes on from it" },
        { "--steps-table", OPTION_COUNT, &o->table, "N", "time of the last N steps by worker (at most 100000)" },
        { "--compare", OPTION_FLAG, &o->compare, NULL, "1 worker, 4, and 4 with 1 bit; on slow networks too" },
        { "--out", OPTION_TEXT, &o->out, "DIR", "where loss.csv, loss.svg and trace.json go (build)" },
        { "--json", OPTION_FLAG, &o->json, NULL, "a JSON object as last line" } };
    option table[32];
    int    count = (int)(sizeof common / sizeof *common), failed;
    memcpy(table, common, sizeof common);
    for (int i = 0; i < extra_count; i++) table[count++] = extra[i];
    failed = options_read("Trains a classifier of handwritten digits.", table, count, argc, argv);
    if (failed) return failed;
    defaults(o);
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
