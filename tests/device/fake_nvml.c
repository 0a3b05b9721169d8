/* A driver library for tests: the functions of NVML that the project calls, with GPUs that only exist here.
 *
 * Environment:
 *   FAKE_NVML_SCENARIO    normal, no_permission, no_energy_counter, lost_gpu, no_driver   (default: normal)
 *   FAKE_NVML_GPUS        number of GPUs (default: 2)
 *   FAKE_NVML_LATENCY_MS  how long setting a clock takes (default: 0)
 *   FAKE_NVML_REASONS     bits that say what holds the clock down (default: 0)
 *   FAKE_NVML_MIG         1: the GPUs are split into instances (default: 0)
 *   FAKE_NVML_LOG         file to which every change is appended: "<pid> <gpu> lock <min> <max>" or "<pid> <gpu> reset"
 *
 * GPU i is called "Fake GPU i", has the UUID "GPU-<i repeated>-fake" and clocks 1410, 1395, ..., 210 MHz.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6,
       INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15 };
enum { TOP_MHZ = 1410, MIN_MHZ = 210, STEP_MHZ = 15, MAX_GPUS = 16, POWER_MW = 300000 };

typedef struct { int index; unsigned locked_mhz; } gpu_t;
static gpu_t gpus[MAX_GPUS];
static int users = 0;

static const char *setting(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value && *value ? value : otherwise;
}
static int scenario_is(const char *name) { return strcmp(setting("FAKE_NVML_SCENARIO", "normal"), name) == 0; }
static unsigned num_gpus(void) { return (unsigned)atoi(setting("FAKE_NVML_GPUS", "2")); }

static void write_log(const char *line) {
    const char *path = getenv("FAKE_NVML_LOG");
    int file = path ? open(path, O_WRONLY | O_CREAT | O_APPEND, 0666) : -1;
    if (file >= 0) {
        if (write(file, line, strlen(line)) < 0) abort();
        close(file);
    }
}

static int may_change_clocks(void) {
    if (users == 0) return UNINITIALIZED;
    if (scenario_is("no_permission")) return NO_PERMISSION;
    if (scenario_is("lost_gpu")) return GPU_IS_LOST;
    usleep((unsigned)atoi(setting("FAKE_NVML_LATENCY_MS", "0")) * 1000);
    return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    if (scenario_is("no_driver")) return DRIVER_NOT_LOADED;
    users++;
    return SUCCESS;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) {
    if (users == 0) return UNINITIALIZED;
    users--;
    return SUCCESS;
}
const char *nvmlErrorString(int code) {
    switch (code) {
        case NOT_SUPPORTED: return "Not Supported";
        case NO_PERMISSION: return "Insufficient Permissions";
        case GPU_IS_LOST: return "GPU is lost";
        case DRIVER_NOT_LOADED: return "Driver Not Loaded";
        default: return "Fake error";
    }
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    if (users == 0) return UNINITIALIZED;
    *count = num_gpus();
    return SUCCESS;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, gpu_t **gpu) {
    if (index >= num_gpus() || index >= MAX_GPUS) return INVALID_ARGUMENT;
    gpus[index].index = (int)index;
    *gpu = &gpus[index];
    return SUCCESS;
}
int nvmlDeviceGetName(gpu_t *gpu, char *name, unsigned size) {
    snprintf(name, size, "Fake GPU %d", gpu->index);
    return SUCCESS;
}
int nvmlDeviceGetUUID(gpu_t *gpu, char *uuid, unsigned size) {
    int i = gpu->index;
    snprintf(uuid, size, "GPU-%d%d%d%d%d%d%d%d-fake", i, i, i, i, i, i, i, i);
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, gpu_t **gpu) {
    char known[80];
    if (strncmp(uuid, "MIG-", 4) == 0) { /* instance j of GPU i is "MIG-<i>-<j>"; its handle is that of the GPU */
        unsigned i = (unsigned)atoi(uuid + 4);
        return i < num_gpus() && strchr(uuid + 4, '-') ? nvmlDeviceGetHandleByIndex_v2(i, gpu) : NOT_FOUND;
    }
    for (unsigned i = 0; i < num_gpus(); i++) {
        nvmlDeviceGetHandleByIndex_v2(i, gpu);
        nvmlDeviceGetUUID(*gpu, known, sizeof known);
        if (strcmp(known, uuid) == 0) return users ? SUCCESS : UNINITIALIZED;
    }
    return NOT_FOUND;
}

int nvmlDeviceGetSupportedMemoryClocks(gpu_t *gpu, unsigned *count, unsigned *clocks) {
    (void)gpu;
    if (!clocks || *count < 2) { *count = 2; return INSUFFICIENT_SIZE; }
    *count = 2;
    clocks[0] = 405;
    clocks[1] = 1593;
    return SUCCESS;
}
int nvmlDeviceGetSupportedGraphicsClocks(gpu_t *gpu, unsigned memory_mhz, unsigned *count, unsigned *clocks) {
    (void)gpu;
    unsigned needed = memory_mhz == 1593 ? (TOP_MHZ - MIN_MHZ) / STEP_MHZ + 1 : 1;
    if (!clocks || *count < needed) { *count = needed; return INSUFFICIENT_SIZE; }
    *count = needed;
    for (unsigned i = 0; i < needed; i++) clocks[i] = MIN_MHZ + i * STEP_MHZ; /* unsorted for the caller's sake */
    return SUCCESS;
}

int nvmlDeviceSetGpuLockedClocks(gpu_t *gpu, unsigned min_mhz, unsigned max_mhz) {
    int code = may_change_clocks();
    if (code != SUCCESS) return code;
    char line[100];
    snprintf(line, sizeof line, "%d %d lock %u %u\n", getpid(), gpu->index, min_mhz, max_mhz);
    gpu->locked_mhz = max_mhz;
    write_log(line);
    return SUCCESS;
}
int nvmlDeviceResetGpuLockedClocks(gpu_t *gpu) {
    int code = may_change_clocks();
    if (code != SUCCESS) return code;
    char line[100];
    snprintf(line, sizeof line, "%d %d reset\n", getpid(), gpu->index);
    gpu->locked_mhz = 0;
    write_log(line);
    return SUCCESS;
}

int nvmlDeviceGetTotalEnergyConsumption(gpu_t *gpu, unsigned long long *energy_mj) {
    (void)gpu;
    if (scenario_is("no_energy_counter")) return NOT_SUPPORTED;
    if (scenario_is("lost_gpu")) return GPU_IS_LOST;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *energy_mj = (uint64_t)((double)POWER_MW * ((double)now.tv_sec + now.tv_nsec * 1e-9));
    return SUCCESS;
}
int nvmlDeviceGetPowerUsage(gpu_t *gpu, unsigned *power_mw) {
    (void)gpu;
    *power_mw = POWER_MW;
    return SUCCESS;
}
int nvmlDeviceGetClockInfo(gpu_t *gpu, int type, unsigned *clock_mhz) {
    if (type == 2) { *clock_mhz = 1593; return SUCCESS; } /* memory */
    if (type != 0) return INVALID_ARGUMENT;
    *clock_mhz = gpu->locked_mhz ? gpu->locked_mhz : TOP_MHZ;
    return SUCCESS;
}
int nvmlDeviceGetPowerManagementLimit(gpu_t *gpu, unsigned *limit_mw) {
    (void)gpu;
    *limit_mw = 400000;
    return SUCCESS;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(gpu_t *gpu, unsigned long long *reasons) {
    (void)gpu;
    *reasons = (unsigned long long)strtoull(setting("FAKE_NVML_REASONS", "0"), NULL, 0);
    return SUCCESS;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(gpu_t *instance, gpu_t **gpu) {
    *gpu = instance;
    return SUCCESS;
}
int nvmlDeviceGetMigMode(gpu_t *gpu, unsigned *now, unsigned *pending) {
    (void)gpu;
    *now = *pending = (unsigned)atoi(setting("FAKE_NVML_MIG", "0"));
    return SUCCESS;
}
