/* A driver library for tests: the functions of NVML that the project calls, with GPUs that only exist here.
 *
 * Environment:
 *   FAKE_NVML_SCENARIO    normal, no_permission, not_supported, no_energy_counter, lost_gpu, no_driver, ignores (changes
 *                         are taken and logged, but nothing happens, as under some hypervisors) (default: normal)
 *   FAKE_NVML_GPUS        number of GPUs (default: 2)
 *   FAKE_NVML_LATENCY_MS  how long setting a clock takes (default: 0)
 *   FAKE_NVML_LANDING_MS  how long after that the clock changes (default: 0)
 *   FAKE_NVML_CAP_MHZ     the clock that the power limit allows (default: any)
 *   FAKE_NVML_TICK_MS     how often the energy counter advances (default: continuously)
 *   FAKE_NVML_IDLE_MHZ    the clock of a GPU without load, which says that it is idle (default: that of a busy one)
 *   FAKE_NVML_DRIVER      version of the driver (default: 570.86.15)
 *   FAKE_NVML_LOST_FILE   while this file exists, all GPUs have fallen off the bus
 *   FAKE_NVML_REASONS     bits that say what holds the clock down, beside the power limit (default: 0)
 *   FAKE_NVML_MIG         1: the GPUs are split into instances (default: 0)
 *   FAKE_NVML_CELSIUS     the temperature (default: 55)
 *   FAKE_NVML_AVERAGE_MW  what nvmlDeviceGetPowerUsage returns, as if averaged (default: the present power)
 *   FAKE_NVML_OLD         1: a driver without functions and fields of 2023 (default: 0)
 *   FAKE_NVML_FAILING_GPU a GPU that is lost when its energy counter is read (default: none)
 *   FAKE_NVML_UNKNOWN_ENERGY, FAKE_NVML_UNKNOWN_CLOCKS, FAKE_NVML_UNKNOWN_PROCESSES  which readings of the energy counter,
 *                         lists of clocks, and of processes, of each process fail for a reason that is not told, from
 *                         1 on: FIRST-LAST (default: none)
 *   FAKE_NVML_PASSING     the code of these failures (default: 999)
 *   FAKE_NVML_NAME        what the GPUs are called, before their number (default: Fake GPU)
 *   FAKE_NVML_REFUSED_GPU, FAKE_NVML_REFUSED_CODE  a GPU that cannot be opened, and what it says (default: none)
 *   FAKE_NVML_KEPT_GPU    a GPU whose clocks this process may not set, as in a container of its own (default: none)
 *   FAKE_NVML_PROCESSES   processes that compute on the GPUs: numbers, or GPU:number, separated by commas (default: none)
 *   FAKE_NVML_CLOCK_LIST  full, none (GPUs tell their highest clock only), unknown (not even that) (default: full)
 *   FAKE_NVML_MODULE      1: GPUs share a module, and the energy counter, with a CPU, as in a GH200 (default: 0)
 *   FAKE_NVML_LOG         file to which every change is appended: "<pid> <gpu> lock <min> <max>" or "<pid> <gpu> reset"
 *
 * A process may drive time and load itself (fake_time, fake_power). Its counter then integrates the power of that load,
 * seen as FAKE_NVML_RAMP_MS (power follows the load with this time constant), FAKE_NVML_WINDOW_MS (the counter averages
 * over so long) and FAKE_NVML_LAG_MS (it shows its values so much later) say.
 *
 * All processes with the same log see the same clocks, as with a real driver.
 *
 * GPU i is called "Fake GPU i", has the UUID "GPU-<i repeated>-fake" and clocks 1410, 1395, ..., 210 MHz.
 */
#include <fcntl.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6,
       INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, FUNCTION_NOT_FOUND = 13, GPU_IS_LOST = 15 };
enum { TOP_MHZ = 1410, MIN_MHZ = 210, STEP_MHZ = 15, MAX_GPUS = 16, POWER_MW = 300000 };

typedef struct { int index; } gpu_t;
typedef struct { unsigned locked_mhz, before_mhz; double since_s; } clock_state_t; /* all zero: never locked */
static gpu_t gpus[MAX_GPUS];
static clock_state_t *clock_states = NULL;
static int users = 0;

static const char *setting(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value && *value ? value : otherwise;
}
static int scenario_is(const char *name) { return strcmp(setting("FAKE_NVML_SCENARIO", "normal"), name) == 0; }
static int passing(void) { return atoi(setting("FAKE_NVML_PASSING", "999")); }
static unsigned num_gpus(void) { return (unsigned)atoi(setting("FAKE_NVML_GPUS", "2")); }

static void write_log(const char *line) {
    const char *path = getenv("FAKE_NVML_LOG");
    int file = path ? open(path, O_WRONLY | O_CREAT | O_APPEND, 0666) : -1;
    if (file >= 0) {
        if (write(file, line, strlen(line)) < 0) abort();
        close(file);
    }
}

static double driven_s = -1; /* the time that a process drives itself */
static double now_s(void) {
    if (driven_s >= 0) return driven_s;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + now.tv_nsec * 1e-9;
}
static double setting_s(const char *name) { return 1e-3 * atof(setting(name, "0")); }

/* What the load of GPU i has drawn by the end of each step: energy (J), and the integral of that (J s). */
enum { MOST_STEPS = 4000000 };
static const double STEP_S = 1e-4;
typedef struct { double wanted_w, drawn_w, *energy_j, *integral_js; int steps; } load_t;
static load_t loads[16];

static double counted_j(const load_t *load, double time_s) {
    double window_s = setting_s("FAKE_NVML_WINDOW_MS");
    int step = (int)(time_s / STEP_S), width = (int)(window_s / STEP_S + 0.5);
    step = step < 0 ? 0 : step >= load->steps ? load->steps - 1 : step;
    if (width == 0) return load->energy_j[step];
    return (load->integral_js[step] - (step >= width ? load->integral_js[step - width] : 0)) / window_s;
}

/* Let time pass until a moment (s, from 0 on), under the power of each GPU's load. */
void fake_time(double time_s) {
    double ramp_s = setting_s("FAKE_NVML_RAMP_MS");
    int begins_anew = time_s < driven_s;
    driven_s = time_s;
    for (int i = 0; i < 16; i++) {
        load_t *load = &loads[i];
        if (!load->energy_j) continue;
        if (begins_anew) load->steps = 0;
        for (; load->steps * STEP_S <= time_s; load->steps++) {
            if (load->steps == MOST_STEPS) abort();
            load->drawn_w += (load->wanted_w - load->drawn_w) * (ramp_s > 0 ? 1 - exp(-STEP_S / ramp_s) : 1);
            double before_j = load->steps ? load->energy_j[load->steps - 1] : 0;
            double before_js = load->steps ? load->integral_js[load->steps - 1] : 0;
            load->energy_j[load->steps] = before_j + load->drawn_w * STEP_S;
            load->integral_js[load->steps] = before_js + (before_j + load->drawn_w * STEP_S / 2) * STEP_S;
        }
    }
}
/* From now on the load of a GPU draws so much (W); idle GPUs draw 60 W or less. */
void fake_power(int gpu, double power_w) {
    load_t *load = &loads[gpu];
    if (!load->energy_j) {
        load->energy_j = calloc(MOST_STEPS, sizeof(double));
        load->integral_js = calloc(MOST_STEPS, sizeof(double));
        if (!load->energy_j || !load->integral_js) abort();
        load->drawn_w = power_w;
        fake_time(driven_s < 0 ? 0 : driven_s);
    }
    load->wanted_w = power_w;
}

static unsigned milliseconds(const char *name) { return (unsigned)atoi(setting(name, "0")); }
static unsigned cap_mhz(void) { return (unsigned)atoi(setting("FAKE_NVML_CAP_MHZ", "1000000")); }
static unsigned least(unsigned a, unsigned b) { return a < b ? a : b; }

static void open_clock_states(void) {
    const char *log = getenv("FAKE_NVML_LOG");
    int file = -1;
    if (clock_states) return;
    if (log) {
        char path[4096];
        snprintf(path, sizeof path, "%s.state", log);
        file = open(path, O_RDWR | O_CREAT, 0666);
        if (file < 0 || ftruncate(file, sizeof(clock_state_t) * MAX_GPUS) != 0) abort();
    }
    clock_states = mmap(NULL, sizeof(clock_state_t) * MAX_GPUS, PROT_READ | PROT_WRITE,
                        MAP_SHARED | (file < 0 ? MAP_ANONYMOUS : 0), file, 0);
    if (clock_states == MAP_FAILED) abort();
    if (file >= 0) close(file);
}
static unsigned wanted_mhz(const clock_state_t *state) { return state->locked_mhz ? state->locked_mhz : TOP_MHZ; }
static unsigned current_mhz(const gpu_t *gpu) {
    const clock_state_t *state = &clock_states[gpu->index];
    const load_t *load = &loads[gpu->index];
    if (load->wanted_w <= 60) {
        unsigned idle_mhz = (unsigned)atoi(setting("FAKE_NVML_IDLE_MHZ", "0"));
        if (idle_mhz) return idle_mhz;
    }
    int has_landed = now_s() >= state->since_s + 1e-3 * milliseconds("FAKE_NVML_LANDING_MS");
    return least(has_landed || !state->before_mhz ? wanted_mhz(state) : state->before_mhz, cap_mhz());
}
static void change_clock(gpu_t *gpu, unsigned locked_mhz) {
    clock_state_t *state = &clock_states[gpu->index];
    if (scenario_is("ignores")) return;
    state->before_mhz = current_mhz(gpu);
    state->since_s = now_s();
    state->locked_mhz = locked_mhz;
}

static int is_old(void) { return atoi(setting("FAKE_NVML_OLD", "0")); }
static int is_in_module(void) { return atoi(setting("FAKE_NVML_MODULE", "0")); }
static int lists_clocks(void) { return strcmp(setting("FAKE_NVML_CLOCK_LIST", "full"), "full") == 0; }
static int is_lost(void) {
    const char *path = getenv("FAKE_NVML_LOST_FILE");
    return scenario_is("lost_gpu") || (path && access(path, F_OK) == 0);
}
static int is_among(const char *name, int number) {
    const char *range = setting(name, "0-0"), *last = strchr(range, '-');
    return number >= atoi(range) && number <= atoi(last ? last + 1 : range);
}
static int may_change_clocks(const gpu_t *gpu) {
    if (users == 0) return UNINITIALIZED;
    if (scenario_is("no_permission") || gpu->index == atoi(setting("FAKE_NVML_KEPT_GPU", "-1"))) return NO_PERMISSION;
    if (scenario_is("not_supported")) return NOT_SUPPORTED;
    if (is_lost()) return GPU_IS_LOST;
    usleep(milliseconds("FAKE_NVML_LATENCY_MS") * 1000);
    return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    if (scenario_is("no_driver")) return DRIVER_NOT_LOADED;
    open_clock_states();
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

int nvmlSystemGetDriverVersion(char *version, unsigned size) {
    snprintf(version, size, "%s", setting("FAKE_NVML_DRIVER", "570.86.15"));
    return users ? SUCCESS : UNINITIALIZED;
}
int nvmlDeviceGetCount_v2(unsigned *count) {
    if (users == 0) return UNINITIALIZED;
    *count = num_gpus();
    return SUCCESS;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, gpu_t **gpu) {
    if (index >= num_gpus() || index >= MAX_GPUS) return INVALID_ARGUMENT;
    if ((int)index == atoi(setting("FAKE_NVML_REFUSED_GPU", "-1"))) return atoi(setting("FAKE_NVML_REFUSED_CODE", "4"));
    gpus[index].index = (int)index;
    *gpu = &gpus[index];
    return SUCCESS;
}
int nvmlDeviceGetIndex(gpu_t *gpu, unsigned *index) {
    if (users == 0) return UNINITIALIZED;
    *index = (unsigned)gpu->index;
    return SUCCESS;
}
int nvmlDeviceGetC2cModeInfoV(gpu_t *gpu, unsigned *is_enabled) {
    (void)gpu;
    *is_enabled = 1;
    return is_in_module() ? SUCCESS : NOT_SUPPORTED;
}
int nvmlDeviceGetName(gpu_t *gpu, char *name, unsigned size) {
    snprintf(name, size, "%s %d", setting("FAKE_NVML_NAME", "Fake GPU"), gpu->index);
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
    static int number = 0;
    (void)gpu;
    if (is_among("FAKE_NVML_UNKNOWN_CLOCKS", ++number)) return passing();
    if (!lists_clocks()) return NOT_SUPPORTED;
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

int nvmlDeviceGetMaxClockInfo(gpu_t *gpu, int type, unsigned *clock_mhz) {
    (void)gpu, (void)type;
    *clock_mhz = TOP_MHZ;
    return strcmp(setting("FAKE_NVML_CLOCK_LIST", "full"), "unknown") == 0 ? NOT_SUPPORTED : SUCCESS;
}

typedef struct {
    unsigned pid;
    unsigned long long used_bytes;
    unsigned gpu_instance, compute_instance;
} process_t;
int nvmlDeviceGetComputeRunningProcesses_v3(gpu_t *gpu, unsigned *count, process_t *processes) {
    unsigned found = 0, room = *count;
    char entries[1024];
    static int number = 0;
    if (is_among("FAKE_NVML_UNKNOWN_PROCESSES", ++number)) return passing();
    if (is_lost()) return GPU_IS_LOST;
    snprintf(entries, sizeof entries, "%s", setting("FAKE_NVML_PROCESSES", ""));
    for (char *entry = strtok(entries, ","); entry; entry = strtok(NULL, ",")) {
        const char *colon = strchr(entry, ':');
        if (colon && atoi(entry) != gpu->index) continue;
        if (processes && found < room) processes[found].pid = (unsigned)atoi(colon ? colon + 1 : entry);
        found++;
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceSetGpuLockedClocks(gpu_t *gpu, unsigned min_mhz, unsigned max_mhz) {
    int code = may_change_clocks(gpu);
    if (code != SUCCESS) return code;
    char line[100];
    snprintf(line, sizeof line, "%d %d lock %u %u\n", getpid(), gpu->index, min_mhz, max_mhz);
    change_clock(gpu, max_mhz);
    write_log(line);
    return SUCCESS;
}
int nvmlDeviceResetGpuLockedClocks(gpu_t *gpu) {
    int code = may_change_clocks(gpu);
    if (code != SUCCESS) return code;
    char line[100];
    snprintf(line, sizeof line, "%d %d reset\n", getpid(), gpu->index);
    change_clock(gpu, 0);
    write_log(line);
    return SUCCESS;
}

int nvmlDeviceGetTotalEnergyConsumption(gpu_t *gpu, unsigned long long *energy_mj) {
    if (users == 0) return UNINITIALIZED;
    static int number = 0;
    if (is_among("FAKE_NVML_UNKNOWN_ENERGY", ++number)) return passing();
    if (scenario_is("no_energy_counter")) return NOT_SUPPORTED;
    if (is_lost() || gpu->index == atoi(setting("FAKE_NVML_FAILING_GPU", "-1"))) return GPU_IS_LOST;
    double tick_s = setting_s("FAKE_NVML_TICK_MS"), time_s = now_s() - setting_s("FAKE_NVML_LAG_MS");
    const load_t *load = &loads[gpu->index];
    if (tick_s > 0) time_s = floor(time_s / tick_s) * tick_s;
    if (load->energy_j) {
        *energy_mj = (uint64_t)(1000 * counted_j(load, time_s));
        return SUCCESS;
    }
    *energy_mj = (uint64_t)(POWER_MW * time_s) * (is_in_module() ? 2 : 1);
    return SUCCESS;
}
int nvmlDeviceGetTemperature(gpu_t *gpu, int sensor, unsigned *celsius) {
    (void)gpu;
    (void)sensor;
    if (is_lost()) return GPU_IS_LOST;
    *celsius = (unsigned)atoi(setting("FAKE_NVML_CELSIUS", "55"));
    return SUCCESS;
}
int nvmlDeviceGetPowerUsage(gpu_t *gpu, unsigned *power_mw) {
    (void)gpu;
    if (is_lost()) return GPU_IS_LOST;
    *power_mw = (unsigned)atoi(setting("FAKE_NVML_AVERAGE_MW", "300000"));
    return SUCCESS;
}
typedef struct {
    unsigned id, scope;
    long long time_us, latency_us;
    int type, code;
    union { double d; unsigned u; unsigned long long ull; } value;
} field_t;
int nvmlDeviceGetFieldValues(gpu_t *gpu, int count, field_t *fields) {
    (void)gpu;
    if (is_lost()) return GPU_IS_LOST;
    for (int i = 0; i < count; i++) {
        fields[i].code = fields[i].id == 186 && !is_old() ? SUCCESS : NOT_SUPPORTED; /* present power */
        fields[i].type = 1;
        fields[i].value.u = loads[gpu->index].energy_j ? (unsigned)(1000 * loads[gpu->index].drawn_w) : POWER_MW;
    }
    return SUCCESS;
}
int nvmlDeviceGetClockInfo(gpu_t *gpu, int type, unsigned *clock_mhz) {
    if (users == 0) return UNINITIALIZED;
    if (is_lost()) return GPU_IS_LOST;
    if (type == 2) { *clock_mhz = 1593; return SUCCESS; } /* memory */
    if (type != 0) return INVALID_ARGUMENT;
    *clock_mhz = current_mhz(gpu);
    return SUCCESS;
}
int nvmlDeviceGetPowerManagementLimit(gpu_t *gpu, unsigned *limit_mw) {
    (void)gpu;
    *limit_mw = 400000;
    return SUCCESS;
}
int nvmlDeviceGetPowerManagementDefaultLimit(gpu_t *gpu, unsigned *limit_mw) {
    return nvmlDeviceGetPowerManagementLimit(gpu, limit_mw);
}
int nvmlDeviceSetMemoryLockedClocks(gpu_t *gpu, unsigned min_mhz, unsigned max_mhz) {
    (void)gpu, (void)min_mhz, (void)max_mhz;
    return NOT_SUPPORTED;
}
int nvmlDeviceResetMemoryLockedClocks(gpu_t *gpu) {
    (void)gpu;
    return NOT_SUPPORTED;
}
static int get_reasons(gpu_t *gpu, unsigned long long *reasons) {
    *reasons = (unsigned long long)strtoull(setting("FAKE_NVML_REASONS", "0"), NULL, 0);
    if (atoi(setting("FAKE_NVML_IDLE_MHZ", "0")) && loads[gpu->index].wanted_w <= 60) *reasons |= 0x1; /* idle */
    if (wanted_mhz(&clock_states[gpu->index]) > cap_mhz()) *reasons |= 0x4; /* software power cap */
    return SUCCESS;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(gpu_t *gpu, unsigned long long *reasons) {
    return is_old() ? get_reasons(gpu, reasons) : FUNCTION_NOT_FOUND; /* deprecated */
}
int nvmlDeviceGetCurrentClocksEventReasons(gpu_t *gpu, unsigned long long *reasons) {
    return is_old() ? FUNCTION_NOT_FOUND : get_reasons(gpu, reasons);
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

/* Not NVML's: write a line and never return, as a rank that hangs in a collective; signal handlers run meanwhile. */
void fake_hang(int file) {
    if (write(file, "hangs\n", 6) != 6) abort();
    for (;;) pause();
}
