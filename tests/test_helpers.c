/* The files to copy under examples/: charts, event files for TensorBoard, folders of pictures, a tokenizer. */
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
#include "../examples/bpe.h"
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

/* Texts and their ids by the Python package tokenizers 0.23 (ByteLevelBPETokenizer) with the files of tests/bpe. */
static const struct { const char *text, *ids; } golden[] = {
    { "", "" },
    { "the", "330 68" },
    { "The gradients of the model", "51 71 68 438 276 318 286 279 281 375" },
    { "Hello, world!", "39 359 323 11 275 268 75 67 0" },
    { "don't we'll I'm they've it's he'd you're 'sharp' DON'T",
      "67 291 6 83 275 68 6 75 75 220 40 6 76 279 88 6 410 340 406 317 68 6 67 411 78 84 6 274 220 6 82 71 320 "
      "79 6 220 35 46 45 6 51" },
    { "a  b   c", "64 220 277 269 285" },
    { "  two spaces before", "220 257 86 78 264 79 64 66 261 277 68 69 268 68" },
    { "tabs\tand\nlines\n\n  indented", "83 64 65 82 197 64 280 198 75 260 261 198 198 220 299 67 391 287" },
    { "trailing  ", "83 266 315 331 269" },
    { "x = 12345 + 6.78e-9;", "87 344 316 17 18 19 20 220 10 220 21 13 22 23 68 12 24 26" },
    { "hpml_cuda_text(ctx, text, sizeof text)",
      "273 62 367 67 64 62 83 293 83 7 381 11 257 293 83 11 264 72 89 68 78 69 257 293 83 8" },
    { "--option=value_of(this)", "12 12 399 83 336 28 85 307 84 68 62 78 69 7 330 306 8" },
    { "''s 's's '", "6 6 82 220 6 82 406 220 6" },
    { "\r\n\r\nwindows\r\n", "201 198 201 198 86 260 67 78 86 82 201 198" },
    { "aaaaaaaaaaaaaaaa eeeeee ttttttt",
      "64 64 64 64 64 64 64 64 64 64 64 64 64 64 64 64 220 68 68 68 68 68 68 257 83 83 83 83 83 83" },
    { "for (int i = 0; i < n; i++) x[i] += 1;",
      "69 268 289 260 83 220 72 344 371 26 220 72 220 27 298 26 220 72 10 10 8 220 87 58 72 60 220 10 28 316 26" },
    { " leading", "292 303 67 331" },
    { "a\1b\177c\34d", "64 189 65 221 66 216 67" },
    { "A1b2C3", "32 16 65 17 34 18" },
    { "<|endoftext|>", "27 91 276 67 78 69 83 293 83 91 29" },
    { "re re're", "274 360 6 274" },
    { "3rd 100,000.5%", "18 81 67 316 15 15 11 15 15 15 13 20 4" },
    { "\n", "198" },
    { " ", "220" },
    { "the the  the   the", "330 68 279 220 279 269 279" },
};

static const char *bpe_error(const char *vocabulary, const char *merges)
{
    static char error[400];
    bpe *b = bpe_load(vocabulary, merges, error, sizeof error);
    bpe_free(b);
    return b ? "loaded" : error;
}

TEST(tokens_are_those_of_the_reference_tokenizer)
{
    char error[200], text[1000];
    bpe *b = bpe_load("tests/bpe/vocab.json", "tests/bpe/merges.txt", error, sizeof error);
    ENSURE(b && b->count == 448 && bpe_find(b, "<|endoftext|>", 13) == 447);
    for (size_t g = 0; g < sizeof golden / sizeof golden[0]; g++) {
        int32_t ids[200];
        int64_t n = bpe_encode(b, golden[g].text, strlen(golden[g].text), ids);
        text[0] = 0;
        for (int64_t i = 0; i < n; i++) sprintf(text + strlen(text), i ? " %d" : "%d", (int)ids[i]);
        if (strcmp(text, golden[g].ids) != 0) printf("%s: %s\n", golden[g].text, text);
        ENSURE(strcmp(text, golden[g].ids) == 0);
    }
    bpe_free(b);
}

/* Texts with a | behind each piece but the last, as tokenizers 0.23 cuts them: ByteLevel; Digits(individual_digits) and
   ByteLevel, which SmolLM's tokenizer.json has; Split with the pattern in Qwen2's tokenizer.json. */
static const struct { bpe_cut cut; const char *pieces; } cuts[] = {
    { BPE_CUT_SMOLLM, "Don|'t| WE|'|LL| (|hello|)| x|=|1|0| |1|2|3|4|5" },
    { BPE_CUT_SMOLLM, "a| | =| |3|.|1|4|;|\n\n | b|\t|7" }, { BPE_CUT_SMOLLM, " |1|  |2|\r\n\r|\n|end|\n" },
    { BPE_CUT_SMOLLM, "don|'|T| '|s|'|S" }, { BPE_CUT_SMOLLM, "...|\n|\n|--| !|\n|x" },
    { BPE_CUT_SMOLLM, " \n \n | word" }, { BPE_CUT_SMOLLM, "caf\u00e9| \u65e5\u672c|2|0|2|4| \u2014|x" },
    { BPE_CUT_SMOLLM, "\t|if| (|a|[|1|2|]| +=| \"|s|\")|  " },
    { BPE_CUT_QWEN2, "Don|'t| WE|'LL| (|hello|)| x|=|1|0| |1|2|3|4|5" },
    { BPE_CUT_QWEN2, "a| | =| |3|.|1|4|;\n\n| | b|\t|7" }, { BPE_CUT_QWEN2, " |1| | |2|\r\n\r\n|end|\n" },
    { BPE_CUT_QWEN2, "don|'T| '|s|'S" }, { BPE_CUT_QWEN2, "...\n\n|--| !\n|x" }, { BPE_CUT_QWEN2, " \n \n| | word" },
    { BPE_CUT_QWEN2, "caf\u00e9| \u65e5\u672c|2|0|2|4| \u2014|x" },
    { BPE_CUT_QWEN2, "\tif| (|a|[|1|2|]| +=| \"|s|\")|  " },
    { BPE_CUT_GPT2, "Don|'t| WE|'|LL| (|hello|)| x|=|10| 12345" },
    { BPE_CUT_GPT2, "a| | =| 3|.|14|;|\n\n | b|\t|7" }, { BPE_CUT_GPT2, " 1| | 2|\r\n\r|\n|end|\n" },
    { BPE_CUT_GPT2, "don|'|T| '|s|'|S" }, { BPE_CUT_GPT2, "...|\n|\n|--| !|\n|x" },
    { BPE_CUT_GPT2, " \n \n | word" }, { BPE_CUT_GPT2, "caf\u00e9| \u65e5\u672c|2024| \u2014|x" },
    { BPE_CUT_GPT2, "\t|if| (|a|[|12|]| +=| \"|s|\")|  " } };

TEST(pieces_are_those_of_each_reference_tokenizer)
{
    for (size_t g = 0; g < sizeof cuts / sizeof cuts[0]; g++) {
        char        whole[100], marked[200];
        size_t      n = 0, out = 0;
        const char *pieces = cuts[g].pieces;
        for (const char *p = pieces; *p; p++)
            if (*p != '|') whole[n++] = *p;
        for (size_t at = 0, length; at < n; at += length) {
            length = bpe_piece(cuts[g].cut, (unsigned char *)whole + at, (unsigned char *)whole + n);
            ENSURE(length > 0 && at + length <= n && out + length + 1 < sizeof marked);
            if (at > 0) marked[out++] = '|';
            memcpy(marked + out, whole + at, length);
            out += length;
        }
        if (out != strlen(pieces) || memcmp(marked, pieces, out) != 0)
            printf("%s\nbut: %.*s\n", pieces, (int)out, marked);
        ENSURE(out == strlen(pieces) && memcmp(marked, pieces, out) == 0);
    }
}

TEST(a_byte_without_a_token_is_left_out)
{
    char    vocabulary[2000], error[200];
    int32_t ids[10];
    size_t  n = 0;
    for (int c = '!'; c <= '~'; c++)
        n += (size_t)sprintf(vocabulary + n, "%c\"%s%c\": %d", c == '!' ? '{' : ',', strchr("\"\\", c) ? "\\" : "", c,
                             c - '!');
    n += (size_t)sprintf(vocabulary + n, ",\"\\u0120\": 94,\"ab\": 95}");
    put("merges.txt", "a b\n", 4);
    const char *path = put("vocab.json", vocabulary, n);
    bpe        *b = bpe_load(path, file("merges.txt"), error, sizeof error);
    ENSURE(b && b->of_byte[4] == -1);
    ENSURE(bpe_encode(b, "a\u00e9b", 4, ids) == 1 && ids[0] == 95); /* as the reference: a and b are neighbours */
    ENSURE(bpe_encode(b, "\4\u00e9", 3, ids) == 0);
    bpe_free(b);
}

TEST(any_bytes_come_back_from_tokens)
{
    char     error[200];
    bpe     *b = bpe_load("tests/bpe/vocab.json", "tests/bpe/merges.txt", error, sizeof error);
    hpml_rng rng = { .seed = 7 };
    ENSURE(b);
    for (int run = 0; run < 300; run++) { /* random bytes; at last one long piece, which must not take n^2 time */
        static char    from[200000], to[200000];
        static int32_t ids[200000];
        const char    *scripts = "\u00e9t\u00e9 \u2014 \u041f\u0440\u0438\u0432\u0435\u0442 \u65e5\u672c\u8a9e";
        size_t         n = run == 299 ? sizeof from : (size_t)(200 * hpml_rng_uniform(&rng)), at = 0, length;
        for (size_t i = 0; i < n; i++) from[i] = run == 299 ? "the"[i % 3] : (char)(256 * hpml_rng_uniform(&rng));
        if (run == 0) n = strlen(strcpy(from, scripts));
        int64_t count = bpe_encode(b, from, n, ids);
        for (int64_t i = 0; i < count; i++, at += length) {
            const unsigned char *p = bpe_bytes(b, ids[i], &length);
            ENSURE(p && at + length <= n);
            memcpy(to + at, p, length);
        }
        ENSURE(at == n && memcmp(from, to, n) == 0);
    }
    size_t none;
    ENSURE(!bpe_bytes(b, 448, &none) && none == 0 && !bpe_bytes(b, -1, &none));
    bpe_free(b);
}

TEST(bad_vocabularies_and_merges_are_refused_with_line_and_reason)
{
    static const struct { const char *text, *reason; } vocabularies[] = {
        { "", ":1: the file ends where '{' is expected" },
        { "{\n}", ":2: expected '\"', found byte 0x7d" },
        { "{\"a\": 0\n\"b\": 1}", ":2: expected '}', found byte 0x22" },
        { "{\"a\" 0}", ":1: expected ':', found byte 0x30" },
        { "{\"a\": -1}", ":1: expected an id, a whole number of at least 0" },
        { "{\"a\": 99999999999999999999}", ":1: an id above 5: ids are 0 to" },
        { "{\"a\": 0, \"\\u0061\": 1}", ":1: the token with id 1 has id 0 already" },
        { "{\"a\": 0,\n \"b\": 0}", ":2: two tokens have id 0" },
        { "{\"a\": 0, \"b\": 2}", ":1: 2 tokens, and none has id 1" },
        { "{\"a\": 0} x", ":1: text after the closing brace" },
        { "{\"a\": 0}", ":1: no token for the single byte 32" },
        { "{\"\": 0}", ":1: an empty token" },
        { "{\"a b\": 0}", ":1: a token with character U+0020, which stands for no byte" },
        { "{\"\\u65e5\": 0}", ":1: a token with character U+65E5, which stands for no byte" },
        { "{\"\\u01\": 0}", ":1: a token with an invalid escape or byte" },
        { "{\"\xc3\": 0}", ":1: a token with an invalid escape or byte" },
        { "{\"a", ":1: the file ends within a token" } };
    static const struct { const char *text, *reason; } merges[] = {
        { "#version: 0.2\ne r\nnothing\n", ":3: expected two tokens with one space between them" },
        { "e r\n\n", ":2: expected two tokens with one space between them" },
        { "e r x\n", ":1: expected two tokens with one space between them" },
        { "e  r\n", ":1: expected two tokens with one space between them" },
        { "e r\r\ne r\r\n", ":2: the pair is in line 1 already" },
        { "zz r\n", ":1: the left one is not a token of the vocabulary" },
        { "z \xc4\xa0zz", ":1: the right one is not a token of the vocabulary" },
        { "z z\n", ":1: what they merge to is not a token of the vocabulary" } };
    const char *vocabulary = "tests/bpe/vocab.json", *list = "tests/bpe/merges.txt";
    for (size_t i = 0; i < sizeof vocabularies / sizeof vocabularies[0]; i++) {
        const char *text = bpe_error(put("vocab.json", vocabularies[i].text, strlen(vocabularies[i].text)), list);
        if (!strstr(text, vocabularies[i].reason)) printf("%s: %s\n", vocabularies[i].text, text);
        ENSURE(strstr(text, vocabularies[i].reason) && strstr(text, "vocab.json"));
    }
    for (size_t i = 0; i < sizeof merges / sizeof merges[0]; i++) {
        const char *text = bpe_error(vocabulary, put("merges.txt", merges[i].text, strlen(merges[i].text)));
        if (!strstr(text, merges[i].reason)) printf("%s: %s\n", merges[i].text, text);
        ENSURE(strstr(text, merges[i].reason) && strstr(text, "merges.txt"));
    }
    ENSURE(strstr(bpe_error("/nonexistent/v", list), "/nonexistent/v: cannot be opened"));
    ENSURE(strstr(bpe_error(vocabulary, "tests"), "tests: cannot be read"));
    static char whole[8000];
    FILE       *f = fopen(vocabulary, "rb");
    size_t      size = f ? fread(whole, 1, sizeof whole, f) : 0;
    ENSURE(f && fclose(f) == 0 && size > 5000 && size < sizeof whole);
    for (size_t cut = 0; cut + 2 < size; cut += 7) /* without its end the file is an error, not a smaller vocabulary */
        ENSURE(strncmp(bpe_error(put("vocab.json", whole, cut), list), "loaded", 6) != 0);
}
