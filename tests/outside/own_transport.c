/* A transport of your own, by public names alone: a mailbox that all threads of the process share. Sums, background
   work and 1-bit training on three threads, which this program starts, give the same bits as over THREADS. */
#define HPML_IMPLEMENTATION
#include "../../hpml_comm.h"
#include "../test.h"
#include <pthread.h>

typedef struct letter { struct letter *next; int comm, from, to, tag; size_t bytes; } letter; /* then its bytes */
typedef struct place { int comm, parts; } place; /* state of a communicator: its number; parts split off before */
static struct { pthread_mutex_t mutex; letter *first; } box = { PTHREAD_MUTEX_INITIALIZER, NULL };
static int number(hpml_comm *c) { return ((place *)hpml_comm_state(c))->comm; }
static hpml_status mail_split(hpml_comm *c, hpml_comm *part, const int32_t *ranks, int count, int color)
{
    place *p = (place *)hpml_comm_state(c), *of_part = NULL;
    (void)ranks, (void)count, p->parts++; /* the same number on all ranks */
    if (part) of_part = (place *)hpml_ctx_alloc(hpml_comm_ctx(part), sizeof *of_part, NULL);
    if (of_part) of_part->comm = (p->comm * 10 + p->parts) * 10 + color;
    hpml_comm_set_state(part, of_part);
    return part && !of_part ? HPML_ERR_MEMORY : HPML_OK;
}
static void mail_start(hpml_comm *c, hpml_message *m)
{
    letter **last = &box.first, *l = m->receiving ? NULL : (letter *)malloc(sizeof *l + m->bytes);
    if (!l) return;
    *l = (letter){ NULL, number(c), hpml_comm_rank(c), m->peer, m->tag, m->bytes };
    if (m->bytes > 0) memcpy(l + 1, m->data, m->bytes);
    pthread_mutex_lock(&box.mutex);
    while (*last) last = &(*last)->next;
    *last = l;
    pthread_mutex_unlock(&box.mutex);
    m->done = true;
}
static void mail_test(hpml_comm *c, hpml_message *m)
{
    letter  **at = &box.first, *l;
    const int to = hpml_comm_rank(c), comm = number(c);
    pthread_mutex_lock(&box.mutex);
    while ((l = *at) && (l->comm != comm || l->to != to || l->from != m->peer || l->tag != m->tag)) at = &l->next;
    if (l) *at = l->next;
    pthread_mutex_unlock(&box.mutex);
    if (l) hpml_message_deliver(c, m, l + 1, l->bytes);
    free(l);
}
static void mail_abandon(hpml_comm *c, hpml_message *m) { (void)c, m->done = true; }
static const hpml_transport mail = { .name = "mail", .split = mail_split, .start = mail_start, .test = mail_test,
                                     .abandon = mail_abandon };

static hpml_status work(hpml_comm *c, void *hash)
{
    hpml_ctx     *ctx = hpml_comm_ctx(c);
    hpml_tensor  *in = hpml_input_2d(ctx, 8, 2), *out = hpml_linear(in, 2, NULL);
    hpml_trainer *t = hpml_trainer_create(ctx, &(hpml_trainer_desc){ .input = in, .output = out, .lr = 0.5f });
    const int32_t y[24] = { 1, 0, 1, 1, 0, 1 };
    float         x[48], sum[3] = { (float)hpml_comm_rank(c), 1, 2 };
    for (int i = 0; i < 48; i++) x[i] = (float)(i * 7 % 5);
    hpml_allreduce(c, sum, 3, NULL);
    hpml_job_wait(hpml_iallreduce(c, sum, 3, NULL)); /* (9, 9, 18) */
    hpml_barrier(hpml_comm_split(c, hpml_comm_rank(c) % 2, 0));
    hpml_distribute(t, c, &(hpml_plan){ .codec.kind = HPML_CODEC_ONEBIT, .bucket_bytes = 1 });
    hpml_trainer_fit(t, hpml_dataset_create(ctx, 24, HPML_DTYPE_F32, 1, in->shape + 1, x, HPML_DTYPE_I32, 1, y), NULL);
    ((uint64_t *)hash)[hpml_comm_rank(c)] = hpml_param_hash(ctx) * (sum[0] == 9 && sum[2] == 18);
    return hpml_ctx_status(ctx);
}
static uint64_t hashes[2][3]; /* of the weights: over THREADS, over mail */
static void *rank_main(void *rank)
{
    hpml_ctx      *ctx = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1 });
    hpml_comm_desc d = { .custom = &mail, .custom_user = &(place){ 1, 0 }, .rank = (int)(intptr_t)rank, .ranks = 3 };
    if (work(hpml_comm_create(ctx, &d), hashes[1]) != HPML_OK) puts(hpml_ctx_error(ctx));
    return hpml_ctx_free(ctx), NULL;
}
TEST(a_transport_of_your_own_trains_to_the_same_bits_as_threads)
{
    pthread_t thread[3];
    ENSURE(hpml_launch(&(hpml_launch_desc){ .ranks = 3, .ctx.threads = 1 }, work, hashes[0], NULL, 0) == HPML_OK);
    for (intptr_t i = 0; i < 3; i++) ENSURE(pthread_create(&thread[i], NULL, rank_main, (void *)i) == 0);
    for (int i = 0; i < 3; i++) pthread_join(thread[i], NULL);
    for (int i = 0; i < 3; i++) ENSURE(hashes[1][i] == hashes[0][0] && hashes[1][i] != 0);
}
