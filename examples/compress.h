/* compress.h - weights in few bits: the values that stand best for many numbers (k-means), and codes that are shorter
 * for symbols that occur more often (Huffman 1952).
 *
 *     compress_means(w, count, value, 16, symbol);              // w[i] is about value[symbol[i]]; 0 stays 0
 *     uint8_t        memory[4096];
 *     compress_bytes b = { memory, sizeof memory, 0, false };
 *     compress_floats(&b, value, 16, true);                     // true: writes
 *     compress_symbols(&b, symbol, count, 16, true);
 *     if (b.failed) ...                                         // did not fit
 *     compress_bytes c = { memory, b.at, 0, false };
 *     compress_floats(&c, value, 16, false);                    // reads
 *     compress_symbols(&c, symbol, count, 16, false);
 *     if (c.failed || c.at != c.size) ...                       // the bytes are not as written
 *
 * The code is canonical: the lengths of all codes determine the codes, so only the lengths are stored. The bytes read
 * may come from anywhere: each number of bytes or symbols is checked before it is used. After a failure all
 * further calls do nothing, so one check at the end is enough. No global state, no allocation.
 */
#ifndef COMPRESS_H
#define COMPRESS_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define COMPRESS_SYMBOLS 256
#define COMPRESS_DEPTH   48 /* most bits of a code: a longer one needs more than 2^32 symbols */

/* Returns the largest |x| of n numbers. */
static inline float compress_largest(const float *x, int64_t n)
{
    float most = 0;
    for (int64_t i = 0; i < n; i++) most = fmaxf(most, fabsf(x[i]));
    return most;
}

/* k-means in one dimension, from evenly spread values, 20 times: each number gets the symbol of the nearest value, then
 * each value becomes the mean of its numbers. Symbol 0 is for numbers that are 0; value[0] = 0. values: 3 to 256. */
static inline void compress_means(const float *w, int64_t n, float *value, int values, uint8_t *symbol)
{
    const float most = compress_largest(w, n);
    for (int k = 1; k < values; k++) value[k] = most * (2 * (float)(k - 1) / (float)(values - 2) - 1);
    value[0] = 0;
    for (int round = 0; round < 20; round++) {
        double sum[COMPRESS_SYMBOLS] = { 0 }, members[COMPRESS_SYMBOLS] = { 0 };
        for (int64_t i = 0; i < n; i++) {
            int best = w[i] != 0;
            for (int k = 2; k < values && best > 0; k++)
                if (fabsf(w[i] - value[k]) < fabsf(w[i] - value[best])) best = k;
            symbol[i] = (uint8_t)best;
            sum[best] += (double)w[i];
            members[best]++;
        }
        for (int k = 1; k < values && round < 19; k++)
            if (members[k] > 0) value[k] = (float)(sum[k] / members[k]);
    }
}

/* Memory that is written or read from its begin on. */
typedef struct compress_bytes {
    uint8_t *data;
    int64_t  size, at; /* bytes of data; the next byte to write or read */
    bool     failed;
} compress_bytes;

/* Returns the address of the next `count` bytes and moves behind them; NULL: there are not so many. */
static inline uint8_t *compress_next(compress_bytes *b, int64_t count)
{
    if (b->failed || count < 0 || count > b->size - b->at) {
        b->failed = true;
        return NULL;
    }
    b->at += count;
    return b->data + b->at - count;
}

static inline void compress_put_u32(compress_bytes *b, uint32_t value)
{
    uint8_t *to = compress_next(b, 4);
    for (int i = 0; to && i < 4; i++) to[i] = (uint8_t)(value >> 8 * i);
}

static inline uint32_t compress_u32(compress_bytes *b)
{
    const uint8_t *from = compress_next(b, 4);
    uint32_t       value = 0;
    for (int i = 0; from && i < 4; i++) value |= (uint32_t)from[i] << 8 * i;
    return value;
}

/* Writes a number, or reads one, which must be the same. */
static inline void compress_number(compress_bytes *b, uint32_t value, bool write)
{
    if (write) compress_put_u32(b, value);
    else if (compress_u32(b) != value) b->failed = true;
}

static inline void compress_floats(compress_bytes *b, float *x, int64_t count, bool write)
{
    for (int64_t i = 0; i < count && !b->failed; i++) {
        uint32_t bits = 0;
        if (write) memcpy(&bits, &x[i], sizeof bits);
        if (write) compress_put_u32(b, bits);
        else bits = compress_u32(b);
        if (!write) memcpy(&x[i], &bits, sizeof bits);
    }
}

/* Writes the length of each symbol's code to length; 0: the symbol does not occur. The two rarest trees become one,
 * until one is left; the depth of a symbol in it is the length of its code. */
static inline void compress_lengths(const int64_t *count, int symbols, uint8_t *length)
{
    int64_t weight[2 * COMPRESS_SYMBOLS];
    int     parent[2 * COMPRESS_SYMBOLS], nodes = symbols, top = -1;
    for (int i = 0; i < symbols; i++) weight[i] = count[i];
    for (;;) {
        int a = -1, b = -1; /* the two smallest weights above 0 */
        for (int i = 0; i < nodes; i++) {
            if (weight[i] == 0) continue;
            if (a < 0 || weight[i] < weight[a]) {
                b = a;
                a = i;
            } else if (b < 0 || weight[i] < weight[b]) b = i;
        }
        if (b < 0) break;
        top           = nodes++;
        weight[top]   = weight[a] + weight[b];
        weight[a]     = 0;
        weight[b]     = 0;
        parent[a]     = top;
        parent[b]     = top;
    }
    for (int i = 0; i < symbols; i++) {
        length[i] = count[i] > 0;
        for (int n = i; top >= 0 && count[i] > 0 && parent[n] != top; n = parent[n]) length[i]++;
    }
}

/* The canonical code: symbols in order of length, then of number, get codes that count upward. Writes how many codes
 * have each length and the symbols in their order; false: no code has such lengths. */
static inline bool compress_order(const uint8_t *length, int symbols, int64_t *of_length, uint8_t *sorted)
{
    int64_t free_codes = 1;
    int     n = 0;
    memset(of_length, 0, (COMPRESS_DEPTH + 1) * sizeof *of_length);
    for (int bits = 1; bits <= COMPRESS_DEPTH; bits++) {
        for (int i = 0; i < symbols; i++) {
            if (length[i] > COMPRESS_DEPTH) return false;
            if (length[i] != bits) continue;
            sorted[n++] = (uint8_t)i;
            of_length[bits]++;
        }
        free_codes = 2 * free_codes - of_length[bits];
        if (free_codes < 0) return false;
    }
    return true;
}

/* Writes the number of symbols, 32 bits, the lengths of the codes, a byte each, and the codes. */
static inline void compress_encode(compress_bytes *b, const uint8_t *symbol, int64_t count, int symbols)
{
    int64_t  occurs[COMPRESS_SYMBOLS] = { 0 }, of_length[COMPRESS_DEPTH + 1];
    uint64_t code[COMPRESS_SYMBOLS], next = 0;
    uint8_t  sorted[COMPRESS_SYMBOLS], *length, *byte = NULL;
    int64_t  bits_done = 0;
    int      n = 0;
    compress_put_u32(b, (uint32_t)count);
    length = compress_next(b, symbols);
    if (!length) return;
    for (int64_t i = 0; i < count; i++) occurs[symbol[i]]++;
    compress_lengths(occurs, symbols, length);
    compress_order(length, symbols, of_length, sorted);
    for (int bits = 1; bits <= COMPRESS_DEPTH; bits++, next *= 2)
        for (int64_t k = 0; k < of_length[bits]; k++) code[sorted[n++]] = next++;
    for (int64_t i = 0; i < count; i++)
        for (int k = length[symbol[i]] - 1; k >= 0; k--, bits_done++) {
            if (bits_done % 8 == 0) {
                byte = compress_next(b, 1);
                if (!byte) return;
                *byte = 0;
            }
            *byte |= (uint8_t)((code[symbol[i]] >> k & 1) << bits_done % 8);
        }
}

/* Reads the symbols that compress_encode has written. Returns how many, at most `most`; -1: a failure. */
static inline int64_t compress_decode(compress_bytes *b, uint8_t *symbol, int64_t most, int symbols)
{
    int64_t        of_length[COMPRESS_DEPTH + 1], count = compress_u32(b);
    const uint8_t *length = compress_next(b, symbols), *byte = NULL;
    uint8_t        sorted[COMPRESS_SYMBOLS];
    int            bit = 0;
    if (!length || count > most || !compress_order(length, symbols, of_length, sorted)) b->failed = true;
    for (int64_t i = 0; i < count && !b->failed; i++) {
        int64_t code = 0, first = 0, index = 0; /* the first code of the present length, and its place in `sorted` */
        int     bits = 0;
        do {
            if (bit == 0) byte = compress_next(b, 1);
            if (!byte || bits == COMPRESS_DEPTH) break;
            index += of_length[bits];
            first = 2 * (first + of_length[bits]);
            bits++;
            code = 2 * code + (*byte >> bit & 1);
            bit  = (bit + 1) % 8;
        } while (code - first >= of_length[bits]);
        if (bits == 0 || code - first >= of_length[bits]) b->failed = true;
        else symbol[i] = sorted[index + code - first];
    }
    return b->failed ? -1 : count;
}

/* Writes `count` symbols, or reads as many. */
static inline void compress_symbols(compress_bytes *b, uint8_t *symbol, int64_t count, int symbols, bool write)
{
    if (write) compress_encode(b, symbol, count, symbols);
    else if (compress_decode(b, symbol, count, symbols) != count) b->failed = true;
}

/* As compress_symbols, for symbols that are mostly 0: stores the gaps between the others, then the others. The largest
 * gap stands for so many zeros that no symbol follows. work: 2 count bytes. */
enum { COMPRESS_GAPS = 64 };
static inline void compress_sparse(compress_bytes *b, uint8_t *symbol, int64_t count, int symbols, uint8_t *work,
                                  bool write)
{
    uint8_t *gap = work, *value = work + count;
    int64_t  gaps = 0, values = 0, run = 0, at = 0, used = 0;
    if (write) {
        for (int64_t i = 0; i < count; i++) {
            if (symbol[i] == 0 && ++run < COMPRESS_GAPS - 1) continue;
            gap[gaps++] = (uint8_t)run;
            if (symbol[i] != 0) value[values++] = symbol[i];
            run = 0;
        }
        compress_encode(b, gap, gaps, COMPRESS_GAPS);
        compress_encode(b, value, values, symbols);
        return;
    }
    gaps   = compress_decode(b, gap, count, COMPRESS_GAPS);
    values = compress_decode(b, value, count, symbols);
    memset(symbol, 0, (size_t)count);
    for (int64_t i = 0; i < gaps && !b->failed; i++) {
        at += gap[i];
        if (at > count) b->failed = true;
        if (gap[i] == COMPRESS_GAPS - 1 || b->failed) continue;
        if (at == count || used == values) b->failed = true;
        else symbol[at++] = value[used++];
    }
    if (used != values) b->failed = true;
}

#endif /* COMPRESS_H */
