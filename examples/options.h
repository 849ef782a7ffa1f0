/* Command lines of the examples: a table of options, and one function that reads them and answers --help. C and C++. */
#ifndef HPML_OPTIONS_H
#define HPML_OPTIONS_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum option_kind {
    OPTION_FLAG,   /* int: 1 if given */
    OPTION_TEXT,   /* const char * */
    OPTION_CHOICE, /* const char *: one of the words in `value`, which are separated by | */
    OPTION_COUNT,  /* int64_t, at least 0 */
    OPTION_BYTES,  /* int64_t, at least 0; 4K, 16M and 1G are understood */
    OPTION_REAL,   /* double, at least 0 */
    OPTION_WORDS   /* option_words: the arguments that are not options */
} option_kind;

typedef struct option_words {
    const char *word[64];
    int         count;
} option_words;

typedef struct option {
    const char *name; /* "--batch" */
    option_kind kind;
    void       *to;    /* receives the value; holds the default */
    const char *value; /* how --help shows the value: "N", "DIR", "none|bf16|onebit"; NULL for a flag */
    const char *help;  /* what it does, and its default */
} option;

/* Prints a name and its value, with a line break behind a | where it would pass column 78; returns the column. */
static int options_name(const option *o)
{
    int column = printf("  %s%s", o->name, o->value ? " " : "");
    for (const char *word = o->value; word && *word;) {
        int length = (int)strcspn(word, "|") + (strchr(word, '|') != NULL);
        if (column + length > 78) column = printf("\n        ") - 1;
        column += printf("%.*s", length, word);
        word += length;
    }
    return column;
}

static void options_help(const char *about, const option *table, int count)
{
    printf("%s\n", about);
    for (int i = 0; i < count; i++) {
        int width = options_name(&table[i]);
        if (width > 24) printf("\n%24s", "");
        else printf("%*s", 24 - width, "");
        printf("  %s\n", table[i].help);
    }
}

/* True if `word` is one of those in `choice`, "none|bf16|onebit". */
static int options_allow(const char *choice, const char *word)
{
    size_t length = strlen(word);
    for (const char *at = choice; at; at = strchr(at, '|') ? strchr(at, '|') + 1 : NULL)
        if (strncmp(at, word, length) == 0 && (at[length] == '|' || !at[length])) return length > 0;
    return 0;
}

/* A number that ends where the word ends, or in the unit K, M or G of a number of bytes; -1: it is none. */
static double options_number(const char *word, option_kind kind)
{
    static const char units[] = "KMG";
    char             *end;
    double            x    = strtod(word, &end);
    const char       *unit = *end && kind == OPTION_BYTES ? strchr(units, *end) : NULL;
    if (end == word || !(x >= 0) || x > 9e15) return -1;
    for (const char *u = units; unit && u <= unit; u++) x *= 1024;
    if (unit) end++;
    if (*end || (kind != OPTION_REAL && x != (double)(int64_t)x)) return -1;
    return x;
}

static int options_take(const option *o, const char *word)
{
    double x;
    if (o->kind == OPTION_CHOICE && !options_allow(o->value, word))
        return fprintf(stderr, "%s %s: expected one of %s\n", o->name, word, o->value), 2;
    if (o->kind == OPTION_TEXT || o->kind == OPTION_CHOICE) {
        *(const char **)o->to = word;
        return 0;
    }
    x = options_number(word, o->kind);
    if (x < 0) {
        const char *expected = "a number of at least 0";
        if (o->kind == OPTION_COUNT) expected = "a whole number of at least 0";
        if (o->kind == OPTION_BYTES) expected = "a number of bytes, as 4096, 64K, 16M or 1G";
        return fprintf(stderr, "%s %s: expected %s\n", o->name, word, expected), 2;
    }
    if (o->kind == OPTION_REAL) *(double *)o->to = x;
    else *(int64_t *)o->to = (int64_t)x;
    return 0;
}

/* Reads the arguments into the table's places. 0: go on; 1: --help was answered, exit with 0; 2: a message on stderr
   says what is wrong, exit with 2. `about` is the head of the help. */
static int options_read(const char *about, const option *table, int count, int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        int           k = 0, is_word = argv[i][0] != '-';
        option_words *words;
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0)
            return options_help(about, table, count), 1;
        while (k < count && (is_word ? table[k].kind != OPTION_WORDS : strcmp(table[k].name, argv[i]) != 0)) k++;
        if (k == count) return fprintf(stderr, "unknown option %s; --help lists the options\n", argv[i]), 2;
        if (is_word) {
            words = (option_words *)table[k].to;
            if (words->count == 64) return fprintf(stderr, "%s: more than 64 of them\n", table[k].name), 2;
            words->word[words->count++] = argv[i];
        } else if (table[k].kind == OPTION_FLAG) {
            *(int *)table[k].to = 1;
        } else {
            if (i + 1 == argc)
                return fprintf(stderr, "%s: its value %s is missing\n", table[k].name, table[k].value), 2;
            if (options_take(&table[k], argv[++i]) != 0) return 2;
        }
    }
    return 0;
}

#endif
