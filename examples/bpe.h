/* The tokenizers of GPT-2, SmolLM and Qwen2: byte pair encoding (Sennrich et al. 2016) of bytes (Radford et al. 2019),
   from the published files vocab.json and merges.txt. C and C++; needs nothing else.

   A text is cut into pieces: contractions, words, numbers, signs and spaces. How, depends on the model (bpe_cut). A
   piece begins as one token for each byte; then the two neighbours that come first in merges.txt become one token,
   until no pair of neighbours is in the list. The files write each byte as one printable character (bpe_byte), so a
   space is U+0120.

   ASCII text gets the ids of the reference tokenizer. Of other characters the kind (letter, digit ...) is known by
   ranges that cover the commonest ones, so rare ones may be cut elsewhere. Any bytes, also those that are no valid
   UTF-8, come back unchanged from bpe_bytes; but a byte for which the vocabulary has no token (SmolLM's lacks some that
   no UTF-8 text has) is left out, as the reference tokenizer does. A name such as <|endoftext|> in a text is a text as
   any other; bpe_find has its id. */
#ifndef HPML_BPE_H
#define HPML_BPE_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BPE_MOST_BYTES ((size_t)64 << 20) /* of a file */

/* How a text is cut into pieces, as the published tokenizers of these models do: */
typedef enum bpe_cut {
    BPE_CUT_GPT2,   /* see bpe_piece */
    BPE_CUT_SMOLLM, /* each digit is a piece, else as GPT-2 */
    BPE_CUT_QWEN2   /* each digit is a piece; a sign before a word, and line ends behind signs, belong to the piece */
} bpe_cut;

typedef struct bpe_token {
    size_t  start; /* of its bytes in bpe.bytes */
    int32_t length;
    bool    known;
} bpe_token;

typedef struct bpe_merge {
    int32_t left, right, result, rank; /* ids; rank: the line in merges.txt: lower ones are merged first */
} bpe_merge;

typedef struct bpe {
    unsigned char *bytes;
    bpe_token     *token;  /* (count) */
    int32_t        count;  /* ids are 0 to count - 1 */
    int32_t       *names;  /* (name_slots): hash table of ids by bytes, -1: empty */
    bpe_merge     *merges; /* (merge_slots): hash table by left and right; .result 0 and .rank 0: empty */
    size_t         name_slots, merge_slots; /* powers of 2 */
    bpe_cut        cut;                     /* bpe_load sets BPE_CUT_GPT2 */
    int32_t        of_byte[256];            /* the token of each single byte; -1: none */
} bpe;

/* A file in memory, and where it is read. */
typedef struct bpe_file {
    const char    *path;
    unsigned char *text;
    size_t         size, at;
    int32_t        line;
    char          *error; /* receives the first error */
    size_t         capacity;
} bpe_file;

/* Writes "path:line: reason", if it is the first error; returns false. */
static bool bpe_fail(bpe_file *f, const char *format, ...)
{
    va_list a;
    int     n;
    if (f->capacity == 0 || f->error[0]) return false;
    if (f->line > 0) n = snprintf(f->error, f->capacity, "%s:%d: ", f->path, (int)f->line);
    else n = snprintf(f->error, f->capacity, "%s: ", f->path);
    va_start(a, format);
    if (n >= 0 && (size_t)n < f->capacity) vsnprintf(f->error + n, f->capacity - (size_t)n, format, a);
    va_end(a);
    return false;
}

static bool bpe_read(bpe_file *f)
{
    FILE  *file = fopen(f->path, "rb");
    size_t capacity = (size_t)1 << 16, n;
    f->text = (unsigned char *)malloc(capacity);
    while (file && f->text && (n = fread(f->text + f->size, 1, capacity - f->size, file)) > 0) {
        f->size += n;
        if (f->size < capacity) continue;
        unsigned char *more = capacity < BPE_MOST_BYTES ? (unsigned char *)realloc(f->text, 2 * capacity) : NULL;
        if (!more) break;
        f->text = more, capacity *= 2;
    }
    bool is_read = file && f->text && feof(file) && !ferror(file);
    if (file) fclose(file);
    f->line = 0;
    if (!file) return bpe_fail(f, "cannot be opened");
    if (!is_read) return bpe_fail(f, "cannot be read, or has more than %zu MB", BPE_MOST_BYTES >> 20);
    f->line = 1;
    return true;
}

/* Returns the byte that the files write as character c: printable ones as themselves, the others as U+0100 and the
   following, in order. -1: a character that stands for no byte. */
static int bpe_byte(int32_t c)
{
    if ((c >= 33 && c <= 126) || (c >= 161 && c <= 255 && c != 173)) return (int)c;
    if (c < 256 || c > 256 + 67) return -1;
    if (c < 256 + 33) return (int)c - 256;               /* 0 to 32 */
    return c == 256 + 67 ? 173 : (int)c - 256 - 33 + 127; /* 127 to 160, and 173 */
}

/* Decodes the UTF-8 character at p; *bytes is its length. Bytes that are no UTF-8: -1, and a length of 1. */
static int32_t bpe_character(const unsigned char *p, const unsigned char *end, int *bytes)
{
    static const int32_t least[5] = { 0, 0, 0x80, 0x800, 0x10000 };
    int     n = 1 + (*p >= 0x80) + (*p >= 0xe0) + (*p >= 0xf0);
    int32_t c = n == 1 ? *p : *p & (0x7f >> n);
    *bytes = 1;
    if ((*p >= 0x80 && *p < 0xc0) || *p >= 0xf8 || end - p < n) return -1;
    for (int i = 1; i < n; i++) {
        if ((p[i] & 0xc0) != 0x80) return -1;
        c = c << 6 | (p[i] & 0x3f);
    }
    if (c < least[n] || c > 0x10ffff || (c >= 0xd800 && c < 0xe000)) return -1;
    *bytes = n;
    return c;
}

static uint64_t bpe_hash(const void *data, size_t bytes) /* FNV-1a */
{
    uint64_t h = 14695981039346656037u;
    for (size_t i = 0; i < bytes; i++) h = (h ^ ((const unsigned char *)data)[i]) * 1099511628211u;
    return h ^ h >> 29;
}

static size_t bpe_slots(size_t count)
{
    size_t n = 64;
    while (n < 2 * count) n *= 2;
    return n;
}

/* The slot of a token in bpe.names: that of its id, or an empty one. */
static size_t bpe_name_slot(const bpe *b, const unsigned char *bytes, size_t length)
{
    size_t i = (size_t)bpe_hash(bytes, length) & (b->name_slots - 1);
    for (; b->names[i] >= 0; i = (i + 1) & (b->name_slots - 1)) {
        const bpe_token *t = &b->token[b->names[i]];
        if ((size_t)t->length == length && memcmp(b->bytes + t->start, bytes, length) == 0) break;
    }
    return i;
}

/* The id of the token with these bytes; -1: there is none. */
static int32_t bpe_find(const bpe *b, const void *bytes, size_t length)
{
    return b->names[bpe_name_slot(b, (const unsigned char *)bytes, length)];
}

static bpe_merge *bpe_merge_slot(const bpe *b, int32_t left, int32_t right)
{
    const int32_t key[2] = { left, right };
    size_t        i = (size_t)bpe_hash(key, sizeof key) & (b->merge_slots - 1);
    for (; b->merges[i].rank > 0; i = (i + 1) & (b->merge_slots - 1))
        if (b->merges[i].left == left && b->merges[i].right == right) break;
    return &b->merges[i];
}

static void bpe_blank(bpe_file *f)
{
    for (; f->at < f->size && strchr(" \t\r\n", f->text[f->at]) && f->text[f->at]; f->at++)
        f->line += f->text[f->at] == '\n';
}

static bool bpe_expect(bpe_file *f, char c)
{
    bpe_blank(f);
    if (f->at < f->size && f->text[f->at] == (unsigned char)c) return f->at++, true;
    if (f->at == f->size) return bpe_fail(f, "the file ends where '%c' is expected", c);
    return bpe_fail(f, "expected '%c', found byte 0x%02x", c, f->text[f->at]);
}

/* Reads the four digits behind \u, or the character behind another backslash; -1: neither. */
static int32_t bpe_escape(bpe_file *f)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t", digits[] = "0123456789abcdef";
    int32_t     c = 0;
    const char *known = f->at < f->size && f->text[f->at] ? strchr(from, f->text[f->at]) : NULL;
    if (known) return f->at++, to[known - from];
    if (f->size - f->at < 5 || f->text[f->at] != 'u') return -1;
    for (int i = 1; i < 5; i++) {
        unsigned char h = f->text[f->at + (size_t)i];
        const char   *d = h ? strchr(digits, h >= 'A' && h <= 'F' ? h + 32 : h) : NULL;
        if (!d) return -1;
        c = c << 4 | (int32_t)(d - digits);
    }
    f->at += 5;
    return c;
}

/* Reads a JSON string into `to`, which has as many bytes as the rest of the file; returns its length, -1: an error. */
static int64_t bpe_string(bpe_file *f, unsigned char *to)
{
    int64_t n = 0;
    if (!bpe_expect(f, '"')) return -1;
    while (f->at < f->size && f->text[f->at] != '"') {
        int     bytes = 0, byte;
        int32_t c = f->text[f->at] == '\\' ? (f->at++, bpe_escape(f))
                                          : bpe_character(f->text + f->at, f->text + f->size, &bytes);
        byte = bpe_byte(c);
        if (c < 0) return bpe_fail(f, "a token with an invalid escape or byte"), -1;
        if (byte < 0) return bpe_fail(f, "a token with character U+%04X, which stands for no byte", (unsigned)c), -1;
        f->at += (size_t)bytes;
        to[n++] = (unsigned char)byte;
    }
    if (f->at == f->size) return bpe_fail(f, "the file ends within a token"), -1;
    f->at++;
    if (n == 0) return bpe_fail(f, "an empty token"), -1;
    return n;
}

/* Reads ": id"; -1: an error. `most`: the largest id that a file of this size can have. */
static int64_t bpe_id(bpe_file *f, int64_t most)
{
    int64_t id = 0;
    size_t  start;
    if (!bpe_expect(f, ':')) return -1;
    bpe_blank(f);
    start = f->at;
    while (f->at < f->size && f->text[f->at] >= '0' && f->text[f->at] <= '9' && id <= most)
        id = 10 * id + f->text[f->at++] - '0';
    if (f->at == start) return bpe_fail(f, "expected an id, a whole number of at least 0"), -1;
    if (id > most) return bpe_fail(f, "an id above %lld: ids are 0 to the number of tokens - 1", (long long)most), -1;
    return id;
}

/* Reads {"token": id, ...}. */
static bool bpe_vocabulary(bpe *b, bpe_file *f)
{
    int64_t most = (int64_t)(f->size / 5), length, id, count = 0; /* an entry has at least 6 bytes: "a":0, */
    size_t  used = 0;
    b->bytes = (unsigned char *)malloc(f->size + 1);
    b->token = (bpe_token *)calloc((size_t)most + 1, sizeof *b->token);
    b->name_slots = bpe_slots((size_t)most + 1);
    b->names = (int32_t *)malloc(b->name_slots * sizeof *b->names);
    if (!b->bytes || !b->token || !b->names) return bpe_fail(f, "no memory for the tokens");
    memset(b->names, -1, b->name_slots * sizeof *b->names);
    if (!bpe_expect(f, '{')) return false;
    do {
        if ((length = bpe_string(f, b->bytes + used)) < 0 || (id = bpe_id(f, most)) < 0) return false;
        size_t slot = bpe_name_slot(b, b->bytes + used, (size_t)length);
        if (b->names[slot] >= 0)
            return bpe_fail(f, "the token with id %lld has id %d already", (long long)id, (int)b->names[slot]);
        if (b->token[id].known) return bpe_fail(f, "two tokens have id %lld", (long long)id);
        b->token[id].start = used, b->token[id].length = (int32_t)length, b->token[id].known = true;
        b->names[slot] = (int32_t)id;
        used += (size_t)length, count++;
        bpe_blank(f);
    } while (f->at < f->size && f->text[f->at] == ',' && f->at++ < f->size);
    if (!bpe_expect(f, '}')) return false;
    bpe_blank(f);
    if (f->at < f->size) return bpe_fail(f, "text after the closing brace");
    for (id = 0; id < count; id++)
        if (!b->token[id].known)
            return bpe_fail(f, "%lld tokens, and none has id %lld", (long long)count, (long long)id);
    b->count = (int32_t)count;
    for (int i = 0; i < 256; i++) {
        unsigned char byte = (unsigned char)i;
        b->of_byte[i] = bpe_find(b, &byte, 1);
        if (b->of_byte[i] < 0 && i >= ' ' && i <= '~') return bpe_fail(f, "no token for the single byte %d", i);
    }
    return true;
}

/* Reads half of a merge up to the byte `end`, appends its bytes to `to`; returns how many, -1: an error. */
static int64_t bpe_half(bpe_file *f, unsigned char end, unsigned char *to)
{
    int64_t n = 0;
    while (f->at < f->size && f->text[f->at] != end && f->text[f->at] != '\n') {
        int     bytes, byte = bpe_byte(bpe_character(f->text + f->at, f->text + f->size, &bytes));
        bool    is_return = f->text[f->at] == '\r' && end == '\n';
        f->at += (size_t)bytes;
        if (is_return && (f->at == f->size || f->text[f->at] == '\n')) break;
        if (byte < 0) return bpe_fail(f, "expected two tokens with one space between them"), -1;
        to[n++] = (unsigned char)byte;
    }
    if (n == 0 || (end != '\n' && (f->at == f->size || f->text[f->at] != end)))
        return bpe_fail(f, "expected two tokens with one space between them"), -1;
    f->at++;
    return n;
}

/* Reads merges.txt: a line "#version ...", which may be missing, then "left right" in each line. `to`: scratch memory
   of the file's size. */
static bool bpe_merge_list(bpe *b, bpe_file *f, unsigned char *to)
{
    size_t lines = 1;
    for (size_t i = 0; i < f->size; i++) lines += f->text[i] == '\n';
    b->merge_slots = bpe_slots(lines);
    b->merges = (bpe_merge *)calloc(b->merge_slots, sizeof *b->merges);
    if (!b->merges || !to) return bpe_fail(f, "no memory for the merges");
    if (f->size >= 8 && memcmp(f->text, "#version", 8) == 0) {
        while (f->at < f->size && f->text[f->at] != '\n') f->at++;
        f->at++, f->line++;
    }
    for (; f->at < f->size; f->line++) {
        int64_t left = bpe_half(f, ' ', to), right = left < 0 ? -1 : bpe_half(f, '\n', to + left);
        if (right < 0) return false;
        int32_t    l = bpe_find(b, to, (size_t)left), r = bpe_find(b, to + left, (size_t)right);
        int32_t    both = bpe_find(b, to, (size_t)(left + right));
        if (l < 0 || r < 0)
            return bpe_fail(f, "the %s one is not a token of the vocabulary", l < 0 ? "left" : "right");
        if (both < 0) return bpe_fail(f, "what they merge to is not a token of the vocabulary");
        bpe_merge *m = bpe_merge_slot(b, l, r);
        if (m->rank > 0) return bpe_fail(f, "the pair is in line %d already", (int)m->rank);
        m->left = l, m->right = r, m->result = both, m->rank = f->line;
    }
    return true;
}

static void bpe_free(bpe *b)
{
    if (!b) return;
    free(b->bytes);
    free(b->token);
    free(b->names);
    free(b->merges);
    free(b);
}

/* Loads a tokenizer; NULL: `error` (of `capacity` bytes) says which file, line and reason. */
static bpe *bpe_load(const char *vocabulary, const char *merges, char *error, size_t capacity)
{
    bpe     *b = (bpe *)calloc(1, sizeof *b);
    bpe_file v = { vocabulary, NULL, 0, 0, 0, error, capacity }, m = { merges, NULL, 0, 0, 0, error, capacity };
    if (capacity > 0) error[0] = 0;
    bool good = b ? bpe_read(&v) && bpe_vocabulary(b, &v) && bpe_read(&m) : bpe_fail(&v, "no memory");
    unsigned char *scratch = good ? (unsigned char *)malloc(m.size + 1) : NULL;
    good = good && bpe_merge_list(b, &m, scratch);
    free(scratch);
    free(v.text);
    free(m.text);
    if (good) return b;
    bpe_free(b);
    return NULL;
}

/* The bytes of token `id`, *length of them, without a zero at the end; NULL: there is no such id. */
static const unsigned char *bpe_bytes(const bpe *b, int32_t id, size_t *length)
{
    *length = 0;
    if (id < 0 || id >= b->count) return NULL;
    *length = (size_t)b->token[id].length;
    return b->bytes + b->token[id].start;
}

typedef enum bpe_kind { BPE_LETTER, BPE_DIGIT, BPE_SPACE, BPE_SIGN } bpe_kind;

/* The kind of the character at p, of `*bytes` bytes. A byte that is no UTF-8 is a letter. */
static bpe_kind bpe_kind_at(const unsigned char *p, const unsigned char *end, int *bytes)
{
    static const struct { int32_t from, to; bpe_kind kind; } ranges[] = { /* the others are letters */
        { 0, 8, BPE_SIGN }, { 9, 13, BPE_SPACE }, { 14, 31, BPE_SIGN }, { ' ', ' ', BPE_SPACE }, { '!', '/', BPE_SIGN },
        { '0', '9', BPE_DIGIT }, { ':', '@', BPE_SIGN }, { '[', '`', BPE_SIGN }, { '{', 0x84, BPE_SIGN },
        { 0x85, 0x85, BPE_SPACE }, { 0x86, 0x9f, BPE_SIGN }, { 0xa0, 0xa0, BPE_SPACE }, { 0xa1, 0xa9, BPE_SIGN },
        { 0xab, 0xb1, BPE_SIGN }, { 0xb2, 0xb3, BPE_DIGIT }, { 0xb4, 0xb4, BPE_SIGN }, { 0xb6, 0xb8, BPE_SIGN },
        { 0xb9, 0xb9, BPE_DIGIT }, { 0xbb, 0xbb, BPE_SIGN }, { 0xbc, 0xbe, BPE_DIGIT }, { 0xbf, 0xbf, BPE_SIGN },
        { 0xd7, 0xd7, BPE_SIGN }, { 0xf7, 0xf7, BPE_SIGN }, { 0x300, 0x36f, BPE_SIGN }, { 0x2000, 0x200a, BPE_SPACE },
        { 0x200b, 0x2027, BPE_SIGN }, { 0x2028, 0x2029, BPE_SPACE }, { 0x202a, 0x202e, BPE_SIGN },
        { 0x202f, 0x202f, BPE_SPACE }, { 0x2030, 0x205e, BPE_SIGN }, { 0x205f, 0x205f, BPE_SPACE },
        { 0x20a0, 0x20ff, BPE_SIGN }, { 0x2190, 0x245f, BPE_SIGN }, { 0x2460, 0x249b, BPE_DIGIT },
        { 0x2500, 0x2775, BPE_SIGN }, { 0x2794, 0x2bff, BPE_SIGN }, { 0x3000, 0x3000, BPE_SPACE },
        { 0x3001, 0x3004, BPE_SIGN }, { 0x3008, 0x3020, BPE_SIGN }, { 0xfe00, 0xfe0f, BPE_SIGN },
        { 0xff01, 0xff0f, BPE_SIGN }, { 0xff10, 0xff19, BPE_DIGIT }, { 0xff1a, 0xff20, BPE_SIGN },
        { 0x1f000, 0x1faff, BPE_SIGN } };
    int32_t c = bpe_character(p, end, bytes);
    for (size_t i = 0; i < sizeof ranges / sizeof ranges[0] && c >= ranges[i].from; i++)
        if (c <= ranges[i].to) return ranges[i].kind;
    return BPE_LETTER;
}

/* The length in bytes of the contraction at p ('s 't 're 've 'm 'll 'd, or with capital letters), 0: there is none. */
static size_t bpe_contraction(const unsigned char *p, const unsigned char *end, bool capitals)
{
    static const char *const contractions[] = { "'s", "'t", "'re", "'ve", "'m", "'ll", "'d" };
    for (size_t i = 0; i < sizeof contractions / sizeof contractions[0]; i++) {
        const char *c = contractions[i];
        size_t      n = strlen(c), same = 0;
        if ((size_t)(end - p) < n) continue;
        while (same < n && (p[same] == (unsigned char)c[same] || (capitals && same > 0 && p[same] + 32 == c[same])))
            same++;
        if (same == n) return n;
    }
    return 0;
}

/* The end of the characters of one kind that begin at p. */
static const unsigned char *bpe_run(const unsigned char *p, const unsigned char *end, bpe_kind kind)
{
    int bytes;
    while (p < end && bpe_kind_at(p, end, &bytes) == kind) p += bytes;
    return p;
}

/* The length in bytes of the first piece of a text, as GPT-2 cuts: a contraction; letters, digits or signs, with one
   space before them; or spaces, of which the last one is left to the word that follows. */
static size_t bpe_piece_gpt2(const unsigned char *p, const unsigned char *end)
{
    const unsigned char *at = p, *last = p;
    int                  bytes;
    size_t               n = bpe_contraction(p, end, false);
    if (n > 0) return n;
    if (*p == ' ' && end - p > 1) at++;
    bpe_kind kind = bpe_kind_at(at, end, &bytes);
    if (kind != BPE_SPACE) return (size_t)(bpe_run(at, end, kind) - p);
    for (at = p; at < end && bpe_kind_at(at, end, &bytes) == kind; at += bytes) last = at;
    if (at < end && last > p) at = last;
    return (size_t)(at - p);
}

/* As SmolLM cuts: a digit; else a piece of GPT-2's of the text up to the next digit. */
static size_t bpe_piece_smollm(const unsigned char *p, const unsigned char *end)
{
    size_t               n = bpe_piece_gpt2(p, end);
    const unsigned char *at = p;
    bpe_kind             kind;
    int                  bytes;
    do { /* a digit in the piece, or behind the space that GPT-2 leaves to the next piece */
        kind = bpe_kind_at(at, end, &bytes);
        if (kind == BPE_DIGIT) return at == p ? (size_t)bytes : bpe_piece_gpt2(p, at);
        at += bytes;
    } while (at < end && (at < p + n || kind == BPE_SPACE));
    return n;
}

/* As Qwen2 cuts: a contraction; letters, with any sign or space but a line end before them; a digit; signs, with a
   space before and line ends behind them; spaces up to the last line end; or as GPT-2 cuts spaces. */
static size_t bpe_piece_qwen2(const unsigned char *p, const unsigned char *end)
{
    int                  bytes;
    size_t               n = bpe_contraction(p, end, true);
    const bpe_kind       kind = bpe_kind_at(p, end, &bytes);
    const unsigned char *word = kind == BPE_LETTER || *p == '\r' || *p == '\n' ? p : p + bytes;
    const unsigned char *at = bpe_run(word, end, BPE_LETTER), *last = p, *line = p;
    if (n > 0) return n;
    if (kind == BPE_DIGIT) return (size_t)bytes;
    if (at > word) return (size_t)(at - p);
    at = bpe_run(p + (*p == ' '), end, BPE_SIGN);
    if (at > p + (*p == ' ')) {
        while (at < end && (*at == '\r' || *at == '\n')) at++;
        return (size_t)(at - p);
    }
    for (at = p; at < end && bpe_kind_at(at, end, &bytes) == BPE_SPACE; at += bytes) {
        last = at;
        if (*at == '\r' || *at == '\n') line = at + 1;
    }
    if (line > p) return (size_t)(line - p);
    if (at < end && last > p) at = last;
    return (size_t)(at - p);
}

/* The length in bytes of the first piece of a text. */
static size_t bpe_piece(bpe_cut cut, const unsigned char *p, const unsigned char *end)
{
    if (cut == BPE_CUT_SMOLLM) return bpe_piece_smollm(p, end);
    return cut == BPE_CUT_QWEN2 ? bpe_piece_qwen2(p, end) : bpe_piece_gpt2(p, end);
}

/* A token of a piece that is being merged, at first one byte. The parts that are left are a list by `next`. */
typedef struct bpe_part {
    int32_t id, previous, next; /* indices, -1: none; id -1: merged into a part before */
} bpe_part;

/* Two neighbours that can be merged, in a heap whose first one has the lowest rank and, among equal ones, the leftmost
   place. Merges leave pairs in the heap that are no longer neighbours; bpe_merge_all finds that their rank is wrong. */
typedef struct bpe_pair {
    int32_t rank, at;
} bpe_pair;

static bool bpe_before(bpe_pair a, bpe_pair b) { return a.rank < b.rank || (a.rank == b.rank && a.at < b.at); }

static void bpe_push(const bpe *b, const bpe_part *part, int32_t at, bpe_pair *heap, int64_t *count)
{
    if (at < 0 || part[at].next < 0) return;
    bpe_pair pair = { bpe_merge_slot(b, part[at].id, part[part[at].next].id)->rank, at };
    int64_t  i = *count;
    if (pair.rank == 0) return;
    for (; i > 0 && bpe_before(pair, heap[(i - 1) / 2]); i = (i - 1) / 2) heap[i] = heap[(i - 1) / 2];
    heap[i] = pair;
    ++*count;
}

static bpe_pair bpe_pop(bpe_pair *heap, int64_t *count)
{
    bpe_pair first = heap[0], last = heap[--*count];
    int64_t  i = 0, child;
    while ((child = 2 * i + 1) < *count) {
        if (child + 1 < *count && bpe_before(heap[child + 1], heap[child])) child++;
        if (!bpe_before(heap[child], last)) break;
        heap[i] = heap[child], i = child;
    }
    heap[i] = last;
    return first;
}

/* Merges a piece of n bytes; returns the number of ids. part (n), heap (3 n). */
static int64_t bpe_merge_all(const bpe *b, const unsigned char *piece, int32_t n, bpe_part *part, bpe_pair *heap,
                             int32_t *ids)
{
    int64_t count = 0, out = 0;
    int32_t parts = 0;
    for (int32_t i = 0; i < n; i++) {
        part[parts].id = b->of_byte[piece[i]], part[parts].previous = parts - 1, part[parts].next = parts + 1;
        parts += b->of_byte[piece[i]] >= 0;
    }
    if (parts > 0) part[parts - 1].next = -1;
    for (int32_t i = 0; i + 1 < parts; i++) bpe_push(b, part, i, heap, &count);
    while (count > 0) {
        bpe_pair  pair = bpe_pop(heap, &count);
        bpe_part *left = &part[pair.at];
        if (left->id < 0 || left->next < 0) continue;
        bpe_part        *right = &part[left->next];
        const bpe_merge *m = bpe_merge_slot(b, left->id, right->id);
        if (m->rank != pair.rank) continue;
        left->id = m->result, right->id = -1, left->next = right->next;
        if (left->next >= 0) part[left->next].previous = pair.at;
        bpe_push(b, part, left->previous, heap, &count);
        bpe_push(b, part, pair.at, heap, &count);
    }
    for (int32_t i = 0; i >= 0 && parts > 0; i = part[i].next) ids[out++] = part[i].id;
    return out;
}

/* Encodes `length` bytes of text. ids: memory for `length` ids. Returns the number of ids; -1: no memory, or a piece of
   more than 2^29 bytes. */
static int64_t bpe_encode(const bpe *b, const char *text, size_t length, int32_t *ids)
{
    const unsigned char *p = (const unsigned char *)text, *end = p + length;
    size_t               longest = 1, n;
    int64_t              count = 0;
    for (const unsigned char *at = p; at < end; at += n) {
        n = bpe_piece(b->cut, at, end);
        if (n > longest) longest = n;
    }
    if (longest > (size_t)1 << 29) return -1;
    bpe_part *part = (bpe_part *)malloc(longest * sizeof *part);
    bpe_pair *heap = (bpe_pair *)malloc(3 * longest * sizeof *heap);
    for (; part && heap && p < end; p += n) {
        n = bpe_piece(b->cut, p, end);
        count += bpe_merge_all(b, p, (int32_t)n, part, heap, ids + count);
    }
    if (!part || !heap) count = -1;
    free(part);
    free(heap);
    return count;
}

#endif
