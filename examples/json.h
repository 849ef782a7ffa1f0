/* Reads values of a JSON file by their keys. Needs hpml.h (its errors) and bpe.h (which reads files). */
#ifndef HPML_JSON_H
#define HPML_JSON_H

#include "bpe.h"
#include <math.h>

/* A JSON file in memory. Its values are addresses in `text`. */
typedef struct json_file {
    hpml_ctx   *ctx;  /* receives the first error */
    char        path[1024], error[1200];
    char       *text; /* ends with a zero */
    const char *root; /* the object */
} json_file;

static const char *json_blank(const char *p) { return p + strspn(p, " \t\r\n"); }

/* The address behind the value at p, at most `depth` brackets deep; NULL: there is no value. */
static const char *json_end(const char *p, int depth)
{
    const char open = *p, close = open == '{' ? '}' : ']';
    if (open == '"') {
        for (p++; *p && *p != '"'; p++) p += *p == '\\' && p[1];
        return *p ? p + 1 : NULL;
    }
    if (open != '{' && open != '[') {
        size_t n = strcspn(p, "\"{}[],: \t\r\n"); /* a number, true, false or null */
        return n > 0 ? p + n : NULL;
    }
    p = json_blank(p + 1);
    if (*p == close) return p + 1;
    for (; depth > 0; p = json_blank(p + 1)) {
        if (open == '{') {
            p = *p == '"' ? json_end(p, 0) : NULL;
            if (!p || *(p = json_blank(p)) != ':') return NULL;
            p = json_blank(p + 1);
        }
        if (!(p = json_end(p, depth - 1))) return NULL;
        p = json_blank(p);
        if (*p == close) return p + 1;
        if (*p != ',') return NULL;
    }
    return NULL;
}

/* True if the value at p has this text; a text such as "silu" has its quotation marks. */
static bool json_is(const char *p, const char *text)
{
    return strncmp(p, text, strlen(text)) == 0 && json_end(p, 32) == p + strlen(text);
}

/* The value of a key in an object of a file that json_open has read; NULL: it is missing, or `object` is no object. */
static const char *json_find(const char *object, const char *key)
{
    const char *p = object && *object == '{' ? json_blank(object + 1) : "";
    while (*p == '"') {
        const char *end = json_end(p, 0), *value = json_blank(json_blank(end) + 1);
        if ((size_t)(end - p) == strlen(key) + 2 && strncmp(p + 1, key, strlen(key)) == 0)
            return value;
        p = json_blank(json_end(value, 32));
        if (*p == ',') p = json_blank(p + 1);
    }
    return NULL;
}

/* As json_find; a value that is null counts as missing. */
static const char *json_member(const char *object, const char *key)
{
    const char *value = json_find(object, key);
    return value && !json_is(value, "null") ? value : NULL;
}

/* Reads folder/name; false: the context has an error. */
static bool json_open(json_file *f, hpml_ctx *ctx, const char *folder, const char *name)
{
    bpe_file file = { f->path, NULL, 0, 0, 0, f->error, sizeof f->error };
    f->ctx = ctx, f->error[0] = 0, f->root = NULL;
    snprintf(f->path, sizeof f->path, "%s/%s", folder, name);
    bool is_read = bpe_read(&file);
    f->text = (char *)file.text;
    if (!is_read) return hpml_ctx_fail(ctx, HPML_ERR_OPEN, "%s", f->error), false;
    f->text[file.size] = 0; /* bpe_read has memory for one byte more */
    f->root = json_blank(f->text);
    const char *end = *f->root == '{' ? json_end(f->root, 32) : NULL;
    if (end && json_blank(end) == f->text + file.size) return true;
    return hpml_ctx_fail(ctx, HPML_ERR_FORMAT, "%s: not a whole JSON object", f->path), false;
}

/* Fails with the name of the file, the field, the text of its value (NULL: it is missing) and what is supported. */
static void json_refuse(const json_file *f, const char *key, const char *value, const char *supported)
{
    const char *end = value ? json_end(value, 32) : NULL;
    int         n = end ? (int)(end - value < 80 ? end - value : 80) : 7;
    hpml_ctx_fail(f->ctx, HPML_ERR_UNSUPPORTED, "%s: %s is %.*s; supported: %s", f->path, key, n,
                  end ? value : "missing", supported);
}

/* Reads a whole number from `least` to 2^24; missing or null: `other`, or an error if that is -1. */
static int64_t json_count(const json_file *f, const char *key, int64_t other, int64_t least)
{
    const char *value = json_member(f->root, key);
    char       *end, supported[60];
    double      x = value ? strtod(value, &end) : -1;
    if (!value && other >= 0) return other;
    if (value && end == json_end(value, 0) && x >= (double)least && x <= 1 << 24 && x == floor(x)) return (int64_t)x;
    snprintf(supported, sizeof supported, "a whole number from %d to %d", (int)least, 1 << 24);
    json_refuse(f, key, value, supported);
    return least;
}

/* Reads a number above 1e-30, because smaller ones may be 0 as floats, of `object`; a missing one is `other`. */
static double json_real(const json_file *f, const char *object, const char *key, double other)
{
    const char *value = json_member(object, key);
    char       *end;
    double      x = value ? strtod(value, &end) : other;
    if (!value || (end == json_end(value, 0) && x > 1e-30 && x < 1e30)) return x;
    json_refuse(f, key, value, "a number above 1e-30");
    return other;
}

static bool json_flag(const json_file *f, const char *key)
{
    const char *value = json_member(f->root, key);
    if (value && !json_is(value, "true") && !json_is(value, "false")) json_refuse(f, key, value, "true or false");
    return value && json_is(value, "true");
}

#endif
