/* Plays a pipeline by the moves of pipe_move, for all small numbers of stages and micro-batches, and judges them. */
#ifndef PIPE_CHECK_H
#define PIPE_CHECK_H

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

typedef struct pipe_step {
    bool forward; /* else backward */
    int  micro;   /* number of the micro-batch, from 0 */
} pipe_step;
bool pipe_move(int stages, int micro, int stage, int k, pipe_step *move);

enum { PIPE_STAGES = 6, PIPE_MICRO = 12 };

typedef struct pipe_game {
    int    p, m;
    int    done[PIPE_STAGES], live[PIPE_STAGES];  /* moves of each stage; its micro-batches in flight */
    double clock[PIPE_STAGES];                    /* when each stage is free: forward takes 1, backward 2 */
    double end[2][PIPE_STAGES][PIPE_MICRO];       /* when backward, forward passes ended; 0: not yet */
} pipe_game;

static bool pipe_wrong(const pipe_game *g, int stage, const char *what)
{
    printf("%d stages, %d micro-batches: stage %d, move %d: %s\n", g->p, g->m, stage, g->done[stage], what);
    return false;
}

/* Plays the next move of a stage if its input is there; *moved is set then. False: the move is wrong. */
static bool pipe_play(pipe_game *g, int r, bool *moved)
{
    pipe_step s = { false, -1 };
    if (!pipe_move(g->p, g->m, r, g->done[r], &s))
        return g->done[r] == 2 * g->m || pipe_wrong(g, r, "there are moves missing");
    if (g->done[r] >= 2 * g->m) return pipe_wrong(g, r, "all passes are done, and there is one more");
    if (s.micro < 0 || s.micro >= g->m) return pipe_wrong(g, r, "there is no such micro-batch");
    if (g->end[s.forward][r][s.micro] > 0) return pipe_wrong(g, r, "this pass has been done before");
    const int from = s.forward ? r - 1 : r + 1; /* the stage whose result the pass needs */
    double    ready = g->clock[r];
    if (!s.forward && g->end[true][r][s.micro] <= 0) return pipe_wrong(g, r, "backward before forward");
    if (from >= 0 && from < g->p) {
        if (g->end[s.forward][from][s.micro] <= 0) return true; /* waits */
        if (g->end[s.forward][from][s.micro] > ready) ready = g->end[s.forward][from][s.micro];
    }
    g->clock[r] = g->end[s.forward][r][s.micro] = ready + (s.forward ? 1 : 2);
    g->live[r] += s.forward ? 1 : -1;
    if (g->live[r] > g->p - r) return pipe_wrong(g, r, "more micro-batches in flight than stages from here on");
    g->done[r]++;
    *moved = true;
    return true;
}

static bool pipe_check(int p, int m)
{
    static pipe_game g;
    double           last = 0;
    memset(&g, 0, sizeof g);
    g.p = p;
    g.m = m;
    for (bool moved = true; moved;) {
        moved = false;
        for (int r = 0; r < p; r++)
            if (!pipe_play(&g, r, &moved)) return false;
    }
    for (int r = 0; r < p; r++) {
        if (g.done[r] < 2 * m) return pipe_wrong(&g, r, "waits for ever");
        if (g.clock[r] > last) last = g.clock[r];
    }
    if (last <= 3 * (m + p - 1)) return true;
    return pipe_wrong(&g, 0, "the bubble is larger than (stages - 1) / (micro + stages - 1)");
}

int main(void)
{
    for (int p = 1; p <= PIPE_STAGES; p++)
        for (int m = 1; m <= PIPE_MICRO; m++)
            if (!pipe_check(p, m)) return 1;
    printf("right: 1F1B with up to %d stages and %d micro-batches\n", PIPE_STAGES, PIPE_MICRO);
    return 0;
}

#endif
