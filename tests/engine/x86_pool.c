/* Jobs of the pool in kernels/x86/threads.h, for ThreadSanitizer and over forks: `x86_pool TURNS FORKS`. Ends with 0 where all were
   done, once each. */
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include "threads.h"

#define MOST_JOBS 4096

static int cells[MOST_JOBS], counted[MOST_THREADS];
static atomic_int begun, may_end, ran_in_child;

static unsigned next(unsigned *seed) { return (*seed = *seed * 1103515245 + 12345) >> 8; }

/* Written without atomics: the pool is what keeps one job from the next. */
static void mark(void *turn, int index, int thread) {
    (void)thread;
    cells[index] += *(int *)turn;
}

static void count_only(void *nothing, int index, int thread) {
    (void)nothing, (void)index;
    counted[thread]++;
}

static int all_done(int turns, unsigned seed) {
    for (int turn = 1; turn <= turns; turn++) {
        if (next(&seed) % 64 == 0) set_threads(1 + (int)(next(&seed) % 6));
        int count = (int)(next(&seed) % (next(&seed) % 8 ? 9 : MOST_JOBS));
        memset(cells, 0, sizeof cells);
        parallel(mark, &turn, count);
        for (int i = 0; i < MOST_JOBS; i++)
            if (cells[i] != (i < count ? turn : 0)) return 0;
    }
    return 1;
}

/* As of a long prompt at once: each query row of each head. */
static int many_done(void) {
    int sum = 0;
    set_threads(3);
    memset(counted, 0, sizeof counted);
    parallel(count_only, NULL, 3 << 20);
    for (int thread = 0; thread < MOST_THREADS; thread++) sum += counted[thread];
    return sum == 3 << 20;
}

static void hold(void *parent, int index, int thread) {
    (void)index, (void)thread;
    if (getpid() != *(pid_t *)parent) atomic_store(&ran_in_child, 1);
    atomic_store(&begun, 1);
    while (!atomic_load(&may_end)) usleep(100);
}

static void *run_held(void *parent) {
    parallel(hold, parent, 8);
    return NULL;
}

/* In a child that is forked while the job `hold` runs: nothing of it is done there. */
static int alone(unsigned seed) {
    atomic_store(&may_end, 1);
    set_threads(4);
    usleep(20000); /* workers that take what is not theirs have begun by then */
    return all_done(50, seed) && !atomic_load(&ran_in_child);
}

static int forked(unsigned seed) {
    pid_t parent = getpid(), child;
    pthread_t caller;
    int status = 1;
    set_threads(3);
    atomic_store(&begun, 0), atomic_store(&may_end, 0);
    if (pthread_create(&caller, NULL, run_held, &parent)) return 0;
    while (!atomic_load(&begun)) usleep(100);
    if (!(child = fork())) _exit(!alone(seed));
    waitpid(child, &status, 0);
    atomic_store(&may_end, 1);
    pthread_join(caller, NULL);
    return !status && all_done(50, seed);
}

int main(int argc, char **argv) {
    int sound = argc == 3 && all_done(atoi(argv[1]), 7) && many_done();
    for (int i = 0; sound && i < atoi(argv[2]); i++) sound = forked((unsigned)i);
    set_threads(1);
    return !sound;
}
