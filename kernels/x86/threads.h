/* parallel(f, context, n): f(context, i, thread) for i in [0, n), on all threads of the pool, and back when all are done.
 *
 * One job at a time, from one calling thread at a time. A job is one word, the ticket: how many, and which is next. Whoever adds 1 to
 * it and finds that there was one left has that index: the job's fields are its own until it is done, because the caller does not
 * begin another job before. A worker that sleeps through a job is not waited for.
 *
 * Workers look for work for some microseconds before they sleep: the gap between two jobs of a step is shorter than waking up
 * takes, and the gap between two steps is longer than it is worth to take a core from anybody else.
 *
 * No OpenMP: its threads spin or sleep as one for the whole process (appliance/engine/threads.py), and a forked child of a process
 * that has run a parallel region hangs in its first one. Here a forked child begins with a pool of one.
 */
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MOST_THREADS 256
#define SPINS 1500
#define COUNT_SHIFT 32

typedef void (*job_t)(void *context, int index, int thread);

static struct {
    _Atomic uint64_t ticket;
    _Atomic uint32_t done, caller_waits, sleepers, bell;
    _Atomic int threads;
    job_t job;
    void *context;
    pthread_t workers[MOST_THREADS];
} pool = {.threads = 1};

static void futex_wait(_Atomic uint32_t *word, uint32_t seen) { syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0); }
static void futex_wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, MOST_THREADS, NULL, NULL, 0); }
static uint32_t job_count(uint64_t ticket) { return (uint32_t)(ticket >> COUNT_SHIFT); }
static int is_left(uint64_t ticket) { return (uint32_t)ticket < job_count(ticket); }

/* Do what is left of the current job. */
static void do_what_is_left(int thread) {
    while (is_left(atomic_load(&pool.ticket))) {
        uint64_t mine = atomic_fetch_add(&pool.ticket, 1);
        if (!is_left(mine)) return;
        uint32_t count = job_count(mine); /* after our `done` the fields may be another job's */
        pool.job(pool.context, (int)(uint32_t)mine, thread);
        if (atomic_fetch_add(&pool.done, 1) + 1 == count && atomic_load(&pool.caller_waits)) futex_wake(&pool.done);
    }
}

static void *worker(void *argument) {
    int thread = (int)(intptr_t)argument;
    while (thread < atomic_load(&pool.threads)) {
        for (int spin = 0; spin < SPINS && !is_left(atomic_load(&pool.ticket)); spin++) __builtin_ia32_pause();
        atomic_fetch_add(&pool.sleepers, 1);
        uint32_t bell = atomic_load(&pool.bell);
        if (!is_left(atomic_load(&pool.ticket)) && thread < atomic_load(&pool.threads)) futex_wait(&pool.bell, bell);
        atomic_fetch_sub(&pool.sleepers, 1);
        do_what_is_left(thread);
    }
    return NULL;
}

static void ring(void) {
    if (atomic_load(&pool.sleepers)) {
        atomic_fetch_add(&pool.bell, 1);
        futex_wake(&pool.bell);
    }
}

static void parallel(job_t job, void *context, int count) {
    if (count == 1 || atomic_load(&pool.threads) == 1) {
        for (int index = 0; index < count; index++) job(context, index, 0);
        return;
    }
    pool.job = job;
    pool.context = context;
    atomic_store(&pool.done, 0);
    atomic_store(&pool.ticket, (uint64_t)count << COUNT_SHIFT);
    ring();
    do_what_is_left(0);
    for (int spin = 0; spin < SPINS && atomic_load(&pool.done) < (uint32_t)count; spin++) __builtin_ia32_pause();
    atomic_store(&pool.caller_waits, 1);
    for (uint32_t done; (done = atomic_load(&pool.done)) < (uint32_t)count;) futex_wait(&pool.done, done);
    atomic_store(&pool.caller_waits, 0);
}

/* In a forked child: whatever the parent was in the midst of is not for the workers that may begin here. */
static void begin_alone(void) {
    atomic_store(&pool.ticket, 0);
    atomic_store(&pool.threads, 1);
    atomic_store(&pool.sleepers, 0);
    atomic_store(&pool.caller_waits, 0);
}

/* How many threads there are from now on, the caller's among them. Returns how many there are: fewer where no more could be had. */
int set_threads(int threads) {
    static int prepared;
    if (!prepared) prepared = !pthread_atfork(NULL, NULL, begin_alone);
    int before = atomic_load(&pool.threads);
    if (threads < 1) threads = 1;
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    atomic_store(&pool.threads, threads);
    for (int thread = threads; thread < before; thread++) {
        atomic_fetch_add(&pool.bell, 1);
        futex_wake(&pool.bell);
        pthread_join(pool.workers[thread], NULL);
    }
    sigset_t others, ours; /* signals are for the threads that know what to do with them; a worker's own faults are its own */
    sigfillset(&others);
    for (int i = 0; i < 5; i++) sigdelset(&others, (int[]){SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}[i]);
    pthread_sigmask(SIG_BLOCK, &others, &ours);
    for (int thread = before; thread < threads; thread++)
        if (pthread_create(&pool.workers[thread], NULL, worker, (void *)(intptr_t)thread)) atomic_store(&pool.threads, threads = thread);
    pthread_sigmask(SIG_SETMASK, &ours, NULL);
    return threads;
}
