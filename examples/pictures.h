/* Folders of pictures as a dataset: FOLDER/CLASS/PICTURE, one folder for each class, as ImageNet and most others are
   given out. Pictures are decoded when a batch needs them, so that any number of them fits. One file to copy.
   JPEG, PNG and others by stb_image.h (public domain, one file: https://github.com/nothings/stb, or the package
   libstb-dev): include it before this file, with STB_IMAGE_IMPLEMENTATION in one source file.
       pictures p = { .folder = "train", .side = 224 };
       hpml_dataset *d = pictures_open(ctx, &p);   // NULL: an error on the context
   x is (3, side, side), u8, which loaders scale to 0 .. 1; crop and augmentation work as for other images. */
#ifndef HPML_PICTURES_H
#define HPML_PICTURES_H

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef STBI_VERSION
#error "include stb_image.h before pictures.h: https://github.com/nothings/stb"
#endif

typedef struct pictures {
    const char  *folder;
    int          side;    /* pictures are scaled so that their shorter side has so many pixels, and cut to a square */
    /* set by pictures_open: */
    char       **name;    /* (count) paths */
    int         *label;   /* (count) */
    char       **classes; /* (class_count) names of folders, sorted */
    int          count, class_count;
    hpml_dataset data;
} pictures;

static int pictures_order(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

/* Lists the names in a folder, sorted, without those that begin with a dot; returns how many; -1: it cannot be read. */
static int pictures_list(const char *folder, char ***names)
{
    DIR           *dir = opendir(folder);
    struct dirent *e;
    int            n = 0, capacity = 0;
    *names = NULL;
    if (!dir) return -1;
    while ((e = readdir(dir))) {
        if (e->d_name[0] == '.') continue;
        if (n == capacity) {
            capacity     = capacity ? 2 * capacity : 64;
            char **grown = (char **)realloc(*names, sizeof(char *) * (size_t)capacity);
            if (!grown) break;
            *names = grown;
        }
        size_t length = strlen(folder) + strlen(e->d_name) + 2;
        char  *path   = (char *)malloc(length);
        if (!path) break;
        snprintf(path, length, "%s/%s", folder, e->d_name);
        (*names)[n++] = path;
    }
    closedir(dir);
    if (n > 0) qsort(*names, (size_t)n, sizeof **names, pictures_order);
    return n;
}

/* Writes the middle square of a picture (height, width, 3) to `to`, (3, side, side): means of the pixels under each. */
static void pictures_square(const unsigned char *from, int width, int height, int side, unsigned char *to)
{
    const int    shorter = width < height ? width : height, left = (width - shorter) / 2, top = (height - shorter) / 2;
    const double scale   = (double)shorter / side;
    for (int c = 0; c < 3; c++)
        for (int i = 0; i < side; i++)
            for (int j = 0; j < side; j++) {
                int y0 = (int)(i * scale), y1 = (int)((i + 1) * scale), sum = 0, n = 0;
                int x0 = (int)(j * scale), x1 = (int)((j + 1) * scale);
                if (y1 <= y0) y1 = y0 + 1;
                if (x1 <= x0) x1 = x0 + 1;
                for (int y = y0; y < y1; y++)
                    for (int x = x0; x < x1; x++, n++) sum += from[3 * ((top + y) * width + left + x) + c];
                to[(c * side + i) * side + j] = (unsigned char)((sum + n / 2) / n);
            }
}

/* The hpml_fill_fn: decodes the pictures of a batch. */
static hpml_status pictures_fill(void *user, int64_t epoch, const int64_t *numbers, int64_t count, void *const *arrays)
{
    const pictures *p    = (const pictures *)user;
    const size_t    size = (size_t)p->side * (size_t)p->side * 3;
    (void)epoch;
    for (int64_t i = 0; i < count; i++) {
        int            width, height, channels;
        unsigned char *pixels = stbi_load(p->name[numbers[i]], &width, &height, &channels, 3);
        if (!pixels) return HPML_ERR_READ;
        pictures_square(pixels, width, height, p->side, (unsigned char *)arrays[0] + (size_t)i * size);
        stbi_image_free(pixels);
        ((int32_t *)arrays[1])[i] = p->label[numbers[i]];
    }
    return HPML_OK;
}

static void pictures_close(pictures *p)
{
    for (int i = 0; i < p->count; i++) free(p->name[i]);
    for (int i = 0; i < p->class_count; i++) free(p->classes[i]);
    free(p->name);
    free(p->label);
    free(p->classes);
    p->name = p->classes = NULL, p->label = NULL;
    p->count = p->class_count = 0;
}

static hpml_dataset *pictures_open(hpml_ctx *ctx, pictures *p)
{
    hpml_dataset d = { .ctx = ctx, .x_dtype = HPML_DTYPE_U8, .x_ndim = 3, .x_shape = { 3, p->side, p->side },
                       .y_dtype = HPML_DTYPE_I32, .y_size = 1, .fill = pictures_fill, .fill_user = p };
    p->class_count = pictures_list(p->folder, &p->classes);
    if (p->class_count < 0) p->class_count = 0;
    for (int c = 0; c < p->class_count; c++) {
        char **names;
        int    n = pictures_list(p->classes[c], &names);
        for (int i = 0; i < n; i++) {
            char **name  = (char **)realloc(p->name, sizeof(char *) * (size_t)(p->count + 1));
            if (name) p->name = name;
            int   *label = (int *)realloc(p->label, sizeof(int) * (size_t)(p->count + 1));
            if (label) p->label = label;
            if (!name || !label) break;
            p->name[p->count]    = names[i];
            p->label[p->count++] = c;
        }
        free(names);
    }
    d.count   = p->count;
    d.classes = p->class_count;
    p->data   = d;
    if (p->count > 0 && p->side > 0) return &p->data;
    hpml_ctx_fail(ctx, HPML_ERR_OPEN, "pictures: \"%s\": no pictures in folders of classes, or no side", p->folder);
    return NULL;
}

#endif
