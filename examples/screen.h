/* Fits the examples' output to the terminal: its width in columns, and paragraphs broken between words. */
#ifndef HPML_SCREEN_H
#define HPML_SCREEN_H

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef _WIN32
#include <direct.h>
#else
#include <sys/ioctl.h>
#endif

/* Columns of the terminal that stdout is; 80 where it is a file or a pipe, and on Windows. */
static inline int screen_columns(void)
{
#ifndef _WIN32
    struct winsize size;
    if (ioctl(1, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
#endif
    return 80;
}

/* Creates a folder for output files, unless it exists. */
static inline void screen_folder(const char *path)
{
#ifdef _WIN32
    _mkdir(path);
#else
    mkdir(path, 0777);
#endif
}

/* Prints a text; lines wider than the terminal are broken between words. */
static inline void screen_paragraph(const char *text)
{
    int columns = screen_columns() - 1, at = 0;
    while (*text) {
        int length = (int)strcspn(text, " \n");
        if (at > 0 && at + 1 + length > columns) at = 0, putchar('\n');
        if (at > 0) putchar(' ');
        printf("%.*s", length, text);
        at  += length + (at > 0);
        text += length;
        if (*text == '\n') at = 0, putchar('\n');
        if (*text) text++;
    }
    if (at > 0) putchar('\n');
}

#endif
