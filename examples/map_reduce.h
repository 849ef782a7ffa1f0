/* MapReduce (Dean & Ghemawat 2004) in one function over hpml_comm.h: map_reduce. Include hpml_comm.h before.
     map       turns a shard of the data into pairs (key, value), by `emit`
     combine   reduces the pairs of one shard before they are sent, so that fewer are
     shuffle   sends each pair to the rank that owns its key
     reduce    adds up the values of each key. The order of additions is that of shards and pairs, whichever ranks have
               mapped them: with a combiner the sums have the same bits on any number of ranks */
#ifndef MAP_REDUCE_H
#define MAP_REDUCE_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAP_REDUCE_RANKS = 64, MAP_REDUCE_TAG = 0 };

typedef struct pair { char key[16]; int32_t shard, number; double value; } pair; /* number: of the emitted pair */
typedef struct bag { pair *pair; int64_t count, capacity; } bag;
typedef void map_fn(int shard, const void *user, bag *out);

static void emit(bag *b, const char *key, int shard, double value)
{
    pair p = { .shard = shard, .number = (int32_t)b->count, .value = value };
    snprintf(p.key, sizeof p.key, "%s", key);
    if (b->count == b->capacity) {
        b->capacity = 2 * b->capacity + 1024;
        b->pair     = (pair *)realloc(b->pair, sizeof(pair) * (size_t)b->capacity);
        if (!b->pair) fprintf(stderr, "no memory for %lld pairs\n", (long long)b->capacity), exit(1);
    }
    b->pair[b->count++] = p;
}

static int order(const void *a, const void *b)
{
    const pair *p = (const pair *)a, *q = (const pair *)b;
    if (strcmp(p->key, q->key) != 0) return strcmp(p->key, q->key);
    if (p->shard != q->shard) return p->shard < q->shard ? -1 : 1;
    return p->number < q->number ? -1 : 1;
}

/* Replaces pairs of equal keys, from `first` on, by one with their sum, added in the order of shards and pairs. */
static void reduce(bag *b, int64_t first)
{
    int64_t n = first;
    if (b->count > first) qsort(b->pair + first, (size_t)(b->count - first), sizeof(pair), order);
    for (int64_t i = first; i < b->count; i++) {
        if (n > first && strcmp(b->pair[n - 1].key, b->pair[i].key) == 0) b->pair[n - 1].value += b->pair[i].value;
        else b->pair[n++] = b->pair[i];
    }
    b->count = n;
}

/* The rank that reduces a key: FNV-1a hash. */
static int owner(const char *key, int ranks)
{
    uint32_t hash = 2166136261u;
    for (; *key; key++) hash = (hash ^ (uint8_t)*key) * 16777619u;
    return (int)(hash % (uint32_t)ranks);
}

/* Maps `shards` shards, of which this rank has every `ranks`-th one; *out gets one pair for each key that this rank
   owns, in the order of keys. Free out->pair. Collective. */
static hpml_status map_reduce(hpml_comm *c, int shards, map_fn *map, const void *user, bool combine, bag *out)
{
    const int ranks = hpml_comm_size(c), rank = hpml_comm_rank(c);
    int64_t   sent[MAP_REDUCE_RANKS] = { 0 }, received[MAP_REDUCE_RANKS] = { 0 };
    bag       mapped = { 0 }, to[MAP_REDUCE_RANKS] = { { 0 } };
    if (ranks > MAP_REDUCE_RANKS)
        return hpml_ctx_fail(hpml_comm_ctx(c), HPML_ERR_ARGUMENT, "%d ranks: map_reduce.h is for up to %d", ranks,
                             MAP_REDUCE_RANKS);
    for (int s = rank; s < shards; s += ranks) {
        const int64_t first = mapped.count;
        map(s, user, &mapped);
        if (combine) reduce(&mapped, first);
    }
    for (int64_t i = 0; i < mapped.count; i++) {
        const pair *p = &mapped.pair[i];
        emit(&to[owner(p->key, ranks)], p->key, p->shard, p->value);
    }
    for (int r = 0; r < ranks; r++) sent[r] = to[r].count;
    hpml_status status = hpml_all_to_all(c, sent, received, sizeof sent[0]);
    *out = to[rank];
    for (int k = 1; k < ranks && status == HPML_OK; k++) { /* the shuffle */
        const int     r = (rank + k) % ranks, from = (rank - k + ranks) % ranks;
        const int64_t first = out->count;
        for (int64_t i = 0; i < received[from]; i++) emit(out, "", 0, 0);
        pair *into = out->pair ? out->pair + first : NULL;
        status = hpml_sendrecv(c, r, to[r].pair, sizeof(pair) * (size_t)sent[r], from, into,
                               sizeof(pair) * (size_t)received[from], MAP_REDUCE_TAG);
        free(to[r].pair);
    }
    free(mapped.pair);
    reduce(out, 0);
    return status;
}

#endif
