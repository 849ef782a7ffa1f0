/* terminal COLUMNS COMMAND...: runs a command on a pseudo-terminal of this width, prints what it prints, and after it
   each line that does not fit. Exits with the command's status, or with 99 if a line did not fit. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LONGEST = 4096 };

/* Follows one line: the column after each character, as a terminal counts them. */
typedef struct follower {
    char line[LONGEST];
    int  length, column, widest, escape;
} follower;

static void follow(follower *f, int columns, unsigned char c, int *wide)
{
    if (f->length < LONGEST - 1) f->line[f->length++] = (char)c;
    if (f->escape) { /* ESC [ numbers letter */
        if (c >= '@' && c <= '~' && c != '[') f->escape = 0;
    } else if (c == 27) {
        f->escape = 1;
    } else if (c == '\r') {
        f->column = 0;
    } else if (c == '\n') {
        f->line[f->length] = 0;
        if (f->widest > columns) fprintf(stderr, "%d columns: %s", f->widest, f->line);
        *wide += f->widest > columns;
        memset(f, 0, sizeof *f);
    } else if ((c & 0xc0) != 0x80) { /* the first byte of a character */
        f->column++;
        if (f->column > f->widest) f->widest = f->column;
    }
}

int main(int argc, char **argv)
{
    static follower f;
    struct winsize  size = { .ws_row = 24 };
    unsigned char   bytes[4096];
    int             columns = argc > 2 ? atoi(argv[1]) : 0, terminal = posix_openpt(O_RDWR | O_NOCTTY);
    int             status = 0, wide = 0;
    if (columns < 1) return fprintf(stderr, "usage: terminal COLUMNS COMMAND...\n"), 2;
    if (terminal < 0 || grantpt(terminal) || unlockpt(terminal)) return perror("no pseudo-terminal"), 77;
    size.ws_col = (unsigned short)columns;
    pid_t child = fork();
    if (child == 0) {
        setsid();
        int screen = open(ptsname(terminal), O_RDWR);
        ioctl(screen, TIOCSWINSZ, &size);
        dup2(screen, 0);
        dup2(screen, 1);
        dup2(screen, 2);
        execvp(argv[2], argv + 2);
        _exit(127);
    }
    for (ssize_t n; (n = read(terminal, bytes, sizeof bytes)) > 0;) { /* fails when the command has ended */
        fwrite(bytes, 1, (size_t)n, stdout);
        for (ssize_t i = 0; i < n; i++) follow(&f, columns, bytes[i], &wide);
    }
    follow(&f, columns, '\n', &wide);
    waitpid(child, &status, 0);
    if (!WIFEXITED(status)) return 98;
    return wide > 0 ? 99 : WEXITSTATUS(status);
}
