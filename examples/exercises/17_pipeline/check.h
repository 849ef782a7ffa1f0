/* Exercise 17: plays a pipeline by the moves of pipe_move, for all small numbers of stages and micro-batches. */
#include "../grade.h"

typedef struct pipe_step {
    bool forward; /* else backward */
    int  micro;   /* number of the micro-batch, from 0 */
} pipe_step;
/* Sets *move to the pass that stage `stage` of `stages` does as its move number k, with `micro` micro-batches; false:
   the stage has done all. */
bool pipe_move(int stages, int micro, int stage, int k, pipe_step *move);

enum { PIPE_STAGES = 6, PIPE_MICRO = 12 };

typedef struct pipe_game {
    int    p, m;
    int    done[PIPE_STAGES], live[PIPE_STAGES];  /* moves of each stage; its micro-batches in flight, ... */
    int    most[PIPE_STAGES];                     /* ... and the most of them at any time */
    double clock[PIPE_STAGES];                    /* when each stage is free: forward takes 1, backward 2 */
    double end[2][PIPE_STAGES][PIPE_MICRO];       /* when backward, forward passes ended; 0: not yet */
} pipe_game;

static bool pipe_wrong(const pipe_game *g, int stage, const char *what)
{
    return grade_fail("%d stages, %d micro-batches: stage %d, move %d: %s", g->p, g->m, stage, g->done[stage], what);
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
    if (g->live[r] > g->most[r]) g->most[r] = g->live[r];
    g->done[r]++;
    *moved = true;
    return true;
}

/* Plays all stages to their ends; returns when the last is ready, or 0: a move is wrong. */
static double pipe_time(pipe_game *g, int p, int m)
{
    double last = 0;
    memset(g, 0, sizeof *g);
    g->p = p;
    g->m = m;
    for (bool moved = true; moved;) {
        moved = false;
        for (int r = 0; r < p; r++)
            if (!pipe_play(g, r, &moved)) return 0;
    }
    for (int r = 0; r < p; r++) {
        if (g->done[r] < 2 * m) return pipe_wrong(g, r, "waits for ever");
        if (g->clock[r] > last) last = g->clock[r];
    }
    return last;
}

static bool passes(void)
{
    static pipe_game g;
    for (int p = 1; p <= PIPE_STAGES; p++)
        for (int m = 1; m <= PIPE_MICRO; m++)
            if (pipe_time(&g, p, m) <= 0) return false;
    return true;
}

static bool bubble(void)
{
    static pipe_game g;
    for (int p = 1; p <= PIPE_STAGES; p++)
        for (int m = 1; m <= PIPE_MICRO; m++) {
            const double time = pipe_time(&g, p, m);
            if (time <= 0) return false;
            if (time > 3 * (m + p - 1))
                return grade_fail("%d stages, %d micro-batches: %g time units, and %d are enough: the bubble is "
                                  "larger than (stages - 1) / (micro + stages - 1)", p, m, time, 3 * (m + p - 1));
        }
    return true;
}

static bool memory(void)
{
    static pipe_game g;
    for (int p = 1; p <= PIPE_STAGES; p++)
        for (int m = 1; m <= PIPE_MICRO; m++) {
            if (pipe_time(&g, p, m) <= 0) return false;
            for (int r = 0; r < p; r++)
                if (g.most[r] > p - r)
                    return grade_fail("%d stages, %d micro-batches: stage %d keeps the activations of %d "
                                      "micro-batches, more than there are stages from here on, %d", p, m, r,
                                      g.most[r], p - r);
        }
    return true;
}

static const grade_case cases[] = {
    { "each pass once, in an order that ends", 40, passes },
    { "the bubble", 30, bubble },
    { "micro-batches in flight", 30, memory },
};
int main(int argc, char **argv) { return GRADE("17 pipeline, 1F1B", cases); }
