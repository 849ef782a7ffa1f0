/* An allocator that counts bytes and calls, and fails at call number fail_at (0: never). */
#include "../hpml.h"

#include <stdlib.h>

typedef struct meter {
    size_t live;    /* bytes allocated now */
    size_t peak;    /* the largest value of live */
    size_t calls;   /* of meter_alloc */
    size_t fail_at; /* the number of the call that returns NULL */
} meter;

static void *meter_alloc(size_t size, size_t align, void *user)
{
    meter *m = (meter *)user;
    void  *p;
    if (++m->calls == m->fail_at) return NULL;
#ifdef _WIN32
    if (!(p = _aligned_malloc(size, align))) return NULL;
#else
    if (posix_memalign(&p, align, size) != 0) return NULL;
#endif
    m->live += size;
    if (m->live > m->peak) m->peak = m->live;
    return p;
}

static void meter_free(void *p, size_t size, void *user)
{
    ((meter *)user)->live -= size;
#ifdef _WIN32
    _aligned_free(p);
#else
    free(p);
#endif
}
