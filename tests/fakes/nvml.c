/* A libnvidia-ml.so.1 whose cards do what a file says: the lowest seam at which a lost or hung card can be played.
 *
 *     gcc -shared -fPIC -Wl,-soname,libnvidia-ml.so.1 -o libnvidia-ml.so.1 nvml.c
 *
 * FAKE_NVML names a file that is read at every call, a word a line:
 *     cards N          how many there are (0000:01:00.0, 0000:02:00.0, ...)
 *     init N           what nvmlInit returns
 *     used I BYTES     memory in use on card I
 *     holder I PID     who holds it
 *     name NAME        of all cards; else NVIDIA GeForce RTX 3090
 *     nvlinks N        how many of four NVLink connections of each card are up; else it has none at all
 *     lost I           every call about card I gives NVML_ERROR_GPU_IS_LOST
 *     hang I           every call about card I never returns
 *     hang init        nvmlInit never returns
 * FAKE_NVML_CALLS names a file that gets a line a call: the function and the card.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, LOST = 15 };
#define TOTAL (24ULL << 30)
#define MAX_CARDS 8

struct state { int cards, init, hang_init, nvlinks; char name[64]; int lost[MAX_CARDS], hang[MAX_CARDS], holder[MAX_CARDS]; unsigned long long used[MAX_CARDS]; };
struct pci { char legacy[16]; unsigned domain, bus, device, device_id, subsystem_id; char id[32]; };
struct memory { unsigned long long total, free, used; };
struct process { unsigned pid; unsigned long long used; unsigned instance, compute_instance; };

static char handles[MAX_CARDS];

static struct state look(void)
{
    struct state now = {.cards = 1, .nvlinks = -1, .name = "NVIDIA GeForce RTX 3090"};
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[128];
    while (file && fgets(line, sizeof line, file)) {
        int card;
        unsigned long long bytes;
        if (sscanf(line, "cards %d", &now.cards) == 1 || sscanf(line, "init %d", &now.init) == 1) continue;
        if (sscanf(line, "nvlinks %d", &now.nvlinks) == 1 || sscanf(line, "name %63[^\n]", now.name) == 1) continue;
        if (strncmp(line, "hang init", 9) == 0) now.hang_init = 1;
        else if (sscanf(line, "lost %d", &card) == 1) now.lost[card] = 1;
        else if (sscanf(line, "hang %d", &card) == 1) now.hang[card] = 1;
        else if (sscanf(line, "holder %d %llu", &card, &bytes) == 2) now.holder[card] = (int)bytes;
        else if (sscanf(line, "used %d %llu", &card, &bytes) == 2) now.used[card] = bytes;
    }
    if (file) fclose(file);
    return now;
}

static void note(const char *function, int card)
{
    const char *path = getenv("FAKE_NVML_CALLS");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (!file) return;
    fprintf(file, "%s %d\n", function, card);
    fclose(file);
}

static void hang(void) { for (;;) pause(); }

/* What a call about a card comes to before it does anything. */
static int reach(const char *function, void *handle)
{
    int card = (int)((char *)handle - handles);
    struct state now = look();
    note(function, card);
    if (now.hang[card]) hang();
    return now.lost[card] ? LOST : OK;
}

int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    note("init", -1);
    if (look().hang_init) hang();
    return look().init;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code == LOST ? "GPU is lost" : code == 9 ? "Driver Not Loaded" : "an error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "595.45.04"); return OK; }
int nvmlDeviceGetCount_v2(unsigned *count) { note("count", -1); *count = (unsigned)look().cards; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle)
{
    if ((int)index >= look().cards) return INVALID;
    *handle = &handles[index];
    return reach("handle", *handle);
}
int nvmlDeviceGetPciInfo_v3(void *handle, struct pci *pci)
{
    int code = reach("pci", handle);
    memset(pci, 0, sizeof *pci);
    pci->bus = (unsigned)((char *)handle - handles) + 1;
    snprintf(pci->id, sizeof pci->id, "00000000:%02X:00.0", pci->bus);
    snprintf(pci->legacy, sizeof pci->legacy, "0000:%02X:00.0", pci->bus);
    return code;
}
int nvmlDeviceGetUUID(void *handle, char *text, unsigned size)
{
    int code = reach("uuid", handle);
    snprintf(text, size, "GPU-0000000%d-0000-0000-0000-000000000000", (int)((char *)handle - handles));
    return code;
}
int nvmlDeviceGetName(void *handle, char *text, unsigned size)
{
    int code = reach("name", handle);
    snprintf(text, size, "%s", look().name);
    return code;
}
int nvmlDeviceGetNvLinkState(void *handle, unsigned link, unsigned *active)
{
    int code = reach("nvlink", handle), up = look().nvlinks;
    *active = (int)link < up;
    return code != OK ? code : up < 0 ? NOT_SUPPORTED : link > 3 ? INVALID : OK;
}
int nvmlDeviceGetMemoryInfo(void *handle, struct memory *memory)
{
    int code = reach("memory", handle);
    memory->total = TOTAL;
    memory->used = look().used[(char *)handle - handles];
    memory->free = TOTAL - memory->used;
    return code;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, struct process *found)
{
    int card = (int)((char *)handle - handles), code = reach("processes", handle);
    struct state now = look();
    unsigned room = *count;
    *count = now.holder[card] ? 1 : 0;
    if (code || !*count) return code;
    if (room < 1) return 7; /* NVML_ERROR_INSUFFICIENT_SIZE: ask again with room */
    found[0] = (struct process){(unsigned)now.holder[card], now.used[card], 0, 0};
    return OK;
}
int nvmlDeviceGetPersistenceMode(void *handle, int *mode) { *mode = 1; return reach("persistence", handle); }
int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *degrees) { (void)sensor; *degrees = 61; return reach("temperature", handle); }
int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) { (void)handle; *milliwatts = 0; return NOT_SUPPORTED; }
