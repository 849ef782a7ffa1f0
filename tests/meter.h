/* An allocator that counts, and fails at a given call. */
#include "../hpml.h"

#include <stdlib.h>

typedef struct meter { size_t live, calls, fail_at, peak; } meter; /* live, peak: bytes held, the most of them */

static void *meter_alloc(size_t size, size_t align, void *user)
{
    meter *m = (meter *)user;
    void  *p;
    if (++m->calls == m->fail_at) return NULL;
    if (posix_memalign(&p, align, size) != 0) return NULL;
    m->live += size;
    if (m->live > m->peak) m->peak = m->live;
    return p;
}

static void meter_free(void *p, size_t size, void *user)
{
    ((meter *)user)->live -= size;
    free(p);
}
