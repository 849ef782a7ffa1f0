/* A temporary folder of the test program, removed at its end, and the paths of files in it. */
#include <glob.h>
#include <sys/stat.h>
#include <unistd.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char folder[64];

static void folder_remove(void)
{
    char command[100];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    if (system(command) != 0) printf("%s could not be removed\n", folder);
}

/* Returns the path of a file in the folder; valid until four more calls. */
static const char *file(const char *name)
{
    static char path[4][160];
    static int  turn;
    if (!folder[0]) { /* in memory if possible, because on a busy disk the tests' fsync takes minutes */
        strcpy(folder, access("/dev/shm", W_OK) == 0 ? "/dev/shm/hpml_XXXXXX" : "/tmp/hpml_XXXXXX");
        if (!mkdtemp(folder) || atexit(folder_remove) != 0) exit(1);
    }
    turn = (turn + 1) % 4;
    snprintf(path[turn], sizeof path[turn], "%s/%s", folder, name);
    return path[turn];
}

/* Writes a file and returns its path. */
static inline const char *put(const char *name, const void *bytes, size_t size)
{
    const char *path = file(name);
    FILE       *f = fopen(path, "wb");
    if (!f || fwrite(bytes, 1, size, f) != size || fclose(f) != 0) exit(1);
    return path;
}

/* Returns how many files in the folder match a pattern. */
static inline size_t files_like(const char *pattern)
{
    glob_t g;
    size_t n = glob(file(pattern), 0, NULL, &g) == 0 ? g.gl_pathc : 0;
    globfree(&g);
    return n;
}
