/* The files to copy under examples/: charts, event files for TensorBoard, folders of pictures. */
#include "../hpml.h"
#define STBI_VERSION 0 /* a stand-in for stb_image.h, which reads binary PPM files alone */
#include <stdio.h>
#include <stdlib.h>
static unsigned char *stbi_load(const char *path, int *width, int *height, int *channels, int wanted)
{
    FILE          *f = fopen(path, "rb");
    unsigned char *p = NULL;
    if (f && fscanf(f, "P6 %d %d 255", width, height) == 2 && fgetc(f) == '\n') {
        size_t size = (size_t)*width * (size_t)*height * (size_t)wanted;
        p = (unsigned char *)malloc(size);
        if (fread(p, 1, size, f) != size) free(p), p = NULL;
    }
    if (f) fclose(f);
    *channels = wanted;
    return p;
}
static void stbi_image_free(void *p) { free(p); }
#include "../examples/pictures.h"
#include "../examples/events.h"
#include "../examples/plot.h"
#include "test.h"
#include "files.h"

static char bytes[1 << 16];
static size_t read_file(const char *path)
{
    FILE  *f = fopen(path, "rb");
    size_t n = f ? fread(bytes, 1, sizeof bytes - 1, f) : 0;
    if (f) fclose(f);
    bytes[n] = 0;
    return n;
}

TEST(event_files_are_read_back)
{
    const unsigned char digits[] = "123456789";
    ENSURE(events_crc32c(digits, 9) == 0xe3069283u); /* the check value of CRC-32C */
    FILE *f = events_open("/dev/shm", "test");
    if (!f) f = events_open("/tmp", "test");
    ENSURE(f && fclose(f) == 0);
    f = fopen(file("events"), "wb");
    ENSURE(f && events_scalar(f, "loss", 7, 0.25f) == 0 && events_scalar(f, "accuracy", 300, 1) == 0 && fclose(f) == 0);
    size_t n = read_file(file("events")), at = 0;
    int    records = 0;
    while (at + 16 <= n) {
        const unsigned char *p = (const unsigned char *)bytes + at;
        uint64_t length = 0;
        uint32_t sums[2] = { 0 };
        for (int i = 7; i >= 0; i--) length = length << 8 | p[i];
        ENSURE(at + 16 + length <= n);
        for (int i = 3; i >= 0; i--) sums[0] = sums[0] << 8 | p[8 + i];
        for (int i = 3; i >= 0; i--) sums[1] = sums[1] << 8 | p[12 + length + (unsigned)i];
        uint32_t turned = sums[0] - 0xa282ead8u; /* unmasked */
        ENSURE(((turned >> 17) | (turned << 15)) == events_crc32c(p, 8));
        turned = sums[1] - 0xa282ead8u;
        ENSURE(((turned >> 17) | (turned << 15)) == events_crc32c(p + 12, length));
        const unsigned char *e = p + 12; /* an Event: field 1 a double, field 2 a varint, field 5 a Summary */
        ENSURE(e[0] == 9 && e[9] == 16 && (records == 0 ? e[10] == 7 : e[10] == (300 & 127) + 128 && e[11] == 2));
        e += records == 0 ? 11 : 12;
        const char *tag = records == 0 ? "loss" : "accuracy";
        float       value;
        ENSURE(e[0] == 42 && e[2] == 10 && e[4] == 10 && e[5] == strlen(tag) && memcmp(e + 6, tag, e[5]) == 0);
        ENSURE(e[6 + e[5]] == 21);
        memcpy(&value, e + 7 + e[5], sizeof value);
        ENSURE(value == (records == 0 ? 0.25f : 1));
        ENSURE((uint64_t)(e + 11 + e[5] - (p + 12)) == length);
        at += 16 + length;
        records++;
    }
    ENSURE(records == 2 && at == n);
    int removed = system("rm -f /dev/shm/events.out.tfevents.*.test /tmp/events.out.tfevents.*.test");
    ENSURE(removed == 0 && !events_open("/no such folder", "x"));
}

TEST(charts_have_round_ticks_and_names_beside_them)
{
    const float  x[6] = { 2, 4, 8, 16, 32, 64 }, y[6] = { 0.003f, 0.2f, 9, NAN, 70, 0 }, z[6] = { 5, 6, 7, 8, 9, 10 };
    plot_series  s[2] = { { "ring & tree", x, y, 6 }, { "a < b", x, z, 6 } };
    char         path[160];
    plot_chart   c = { strcpy(path, file("chart.svg")), "title", "ranks", "ms", s, 2, 2, 10 };
    double       left;
    ENSURE(plot_draw(&c) == 0 && read_file(path) > 1000);
    static const char *const ticks[] = { ">2<", ">4<", ">8<", ">16<", ">32<", ">64<", ">0.001<", ">0.1<", ">1<",
                                         ">100<" };
    for (size_t i = 0; i < sizeof ticks / sizeof *ticks; i++)
        if (!strstr(bytes, ticks[i])) printf("    no tick %s\n", ticks[i]), test_failed = 1;
    ENSURE(strstr(bytes, "ring &amp; tree") && strstr(bytes, "a &lt; b"));
    ENSURE(!strstr(bytes, "nan") && !strstr(bytes, "inf"));
    const char *name = strstr(bytes, ">ring");
    while (name > bytes && strncmp(name, "<text", 5) != 0) name--;
    ENSURE(sscanf(name, "<text x=\"%lf\"", &left) == 1 && left > 640); /* right of the chart */
    ENSURE(plot_svg(path, "t", "x", "y", s + 1, 1) == 0 && read_file(path) > 500);
    ENSURE(strstr(bytes, ">0<") && strstr(bytes, ">2<") && strstr(bytes, ">10<") && strstr(bytes, ">60<"));
    s[0].count = 0;
    ENSURE(plot_svg(path, "t", "x", "y", s, 1) == 0 && read_file(path) > 500 && !strstr(bytes, "nan"));
    ENSURE(plot_svg("/no such folder/x.svg", "t", "x", "y", s, 1) == -1);
    static const double rounds[][2] = { { 0.7, 1 }, { 1.2, 2 }, { 0.03, 0.05 }, { 600, 1000 }, { 5, 5 } };
    for (int i = 0; i < 5; i++) ENSURE_NEAR(plot_round(rounds[i][0]), rounds[i][1], 1e-9 * rounds[i][1]);
}

TEST(a_folder_of_pictures_is_a_dataset)
{
    hpml_ctx  *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1 });
    char       folder_of[160], text[512];
    pictures   p = { .folder = strcpy(folder_of, file("pictures")), .side = 2 };
    hpml_batch b;
    snprintf(text, sizeof text, "mkdir -p %s/dogs %s/cats", p.folder, p.folder);
    ENSURE(system(text) == 0);
    for (int i = 0; i < 3; i++) { /* 6 x 4 pixels; the middle square is columns 1 to 4 */
        int n = snprintf(text, sizeof text, "P6 6 4 255\n");
        for (int k = 0; k < 72; k++) text[n++] = (char)(k % 3 == 0 ? 10 * i + k / 36 * 100 : k / 3 % 6);
        snprintf(folder_of, sizeof folder_of, "pictures/%s/%d.ppm", i < 2 ? "cats" : "dogs", i);
        put(folder_of, text, (size_t)n);
    }
    strcpy(folder_of, file("pictures"));
    hpml_dataset *d = pictures_open(ctx, &p);
    ENSURE(d && d->count == 3 && d->classes == 2 && strstr(p.classes[0], "cats") && p.label[2] == 1);
    hpml_loader *l = hpml_loader_create(ctx, d, &(hpml_loader_desc){ .batch = 3, .in_order = true });
    ENSURE(hpml_loader_next(l, &b) && b.samples == 3 && ((const int32_t *)b.y)[2] == 1);
    for (int i = 0; i < 3; i++) {
        const float *x = (const float *)b.x + 12 * i; /* (3, 2, 2) */
        ENSURE_NEAR(255 * x[0], 10 * i, 1e-3);
        ENSURE_NEAR(255 * x[2], 10 * i + 100, 1e-3);
        ENSURE_NEAR(255 * x[4], 2, 1e-3); /* the mean of columns 1 and 2, rounded */
        ENSURE_NEAR(255 * x[5], 4, 1e-3);
    }
    hpml_loader_free(l);
    put("pictures/dogs/3.ppm", "no picture", 10);
    pictures_close(&p);
    d = pictures_open(ctx, &p);
    l = hpml_loader_create(ctx, d, &(hpml_loader_desc){ .batch = 4, .in_order = true });
    ENSURE_ERROR(ctx, !hpml_loader_next(l, &b), HPML_ERR_READ, "failed in batch 0");
    hpml_loader_free(l);
    pictures_close(&p);
    p.folder = "/no such folder";
    ENSURE_ERROR(ctx, !pictures_open(ctx, &p), HPML_ERR_OPEN, "no such folder");
    hpml_ctx_free(ctx);
}
