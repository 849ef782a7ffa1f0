/* Event files for TensorBoard: scalars by step, without TensorFlow or protobuf. One file to copy; needs libc.
   events_open makes FOLDER/events.out.tfevents.TIME.NAME; `tensorboard --logdir FOLDER` shows one curve for each tag.
   A file is a sequence of records: length u64, masked CRC-32C of these 8 bytes u32, the bytes, their masked CRC-32C
   u32, all little-endian; the bytes are a protocol buffer "Event". */
#ifndef HPML_EVENTS_H
#define HPML_EVENTS_H

#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

/* CRC-32C (Castagnoli), bit by bit: event files are small. */
static inline uint32_t events_crc32c(const unsigned char *p, size_t n)
{
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < n; i++) {
        crc ^= p[i];
        for (int bit = 0; bit < 8; bit++) crc = crc & 1 ? crc >> 1 ^ 0x82f63b78u : crc >> 1;
    }
    return ~crc;
}

/* The checksum as the format stores it: rotated, plus a constant, so that checksums of checksums stay apart. */
static inline uint32_t events_masked(const unsigned char *p, size_t n)
{
    uint32_t crc = events_crc32c(p, n);
    return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
}

static inline unsigned char *events_little(unsigned char *to, uint64_t x, int bytes)
{
    for (int i = 0; i < bytes; i++) *to++ = (unsigned char)(x >> 8 * i);
    return to;
}

static inline unsigned char *events_varint(unsigned char *to, uint64_t x)
{
    for (; x > 127; x >>= 7) *to++ = (unsigned char)(x | 128);
    *to++ = (unsigned char)x;
    return to;
}

/* Writes field number `field` of n bytes: a string or a message. */
static inline unsigned char *events_bytes(unsigned char *to, int field, const void *bytes, size_t n)
{
    *to++ = (unsigned char)(field << 3 | 2);
    to = events_varint(to, n);
    memcpy(to, bytes, n);
    return to + n;
}

/* Appends a record; 0, or -1 when that fails. */
static inline int events_record(FILE *f, const unsigned char *bytes, size_t n)
{
    unsigned char head[12], tail[4];
    events_little(head, n, 8);
    events_little(head + 8, events_masked(head, 8), 4);
    events_little(tail, events_masked(bytes, n), 4);
    int good = fwrite(head, 1, 12, f) == 12 && fwrite(bytes, 1, n, f) == n && fwrite(tail, 1, 4, f) == 4;
    return good ? 0 : -1;
}

/* Writes the start of an Event: its wall time, a double, and its step. */
static inline unsigned char *events_begin(unsigned char *to, double seconds, int64_t step)
{
    uint64_t bits;
    memcpy(&bits, &seconds, sizeof bits);
    *to++ = 1 << 3 | 1;
    to    = events_little(to, bits, 8);
    *to++ = 2 << 3;
    return events_varint(to, (uint64_t)step);
}

/* Opens a new event file in a folder that exists; NULL: it cannot be written. name: of this run, such as "rank0". */
static inline FILE *events_open(const char *folder, const char *name)
{
    static const char version[] = "brain.Event:2";
    unsigned char     event[64], *end = events_begin(event, (double)time(NULL), 0);
    char              path[1024];
    snprintf(path, sizeof path, "%s/events.out.tfevents.%lld.%s", folder, (long long)time(NULL), name);
    FILE *f = fopen(path, "wb");
    end = events_bytes(end, 3, version, sizeof version - 1);
    if (f && events_record(f, event, (size_t)(end - event)) == 0) return f;
    if (f) fclose(f);
    return NULL;
}

/* Appends a scalar of a step, such as events_scalar(f, "loss", step, loss). A tag has at most 200 bytes. 0, or -1. */
static inline int events_scalar(FILE *f, const char *tag, int64_t step, float value)
{
    unsigned char inner[256], summary[288], event[320], *end;
    uint32_t      bits;
    if (!f || strlen(tag) > 200) return -1;
    memcpy(&bits, &value, sizeof bits);
    end    = events_bytes(inner, 1, tag, strlen(tag)); /* Summary.Value: tag, simple_value */
    *end++ = 2 << 3 | 5;
    end    = events_little(end, bits, 4);
    end    = events_bytes(summary, 1, inner, (size_t)(end - inner)); /* Summary: value */
    size_t n = (size_t)(end - summary);
    end = events_begin(event, (double)time(NULL), step);
    end = events_bytes(end, 5, summary, n); /* Event: summary */
    return events_record(f, event, (size_t)(end - event));
}

#endif
