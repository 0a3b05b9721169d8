"""What NVML tells of a GPU's clocks and users, where models, drivers and hypervisors differ in what they tell.

Functions take the library and a handle.
"""

from __future__ import annotations

import contextlib
import time

from lightning_pfo.device.backends.nvml_library import Handle, NvmlLibrary

# newer drivers may lack the second function, older ones lack the first (nvml.h)
_REASONS_FUNCTIONS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
# bits that they return; the others are requests, not limits
_LIMITS = {0x4: "power_cap", 0x8: "hw_slowdown", 0x20: "thermal", 0x40: "thermal", 0x80: "hw_slowdown"}
# pynvml's names without a version raise an error of another kind where the driver is older than itself
_PROCESS_FUNCTIONS = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses")
_PROCESS_VERSIONS = ("_v3", "_v2")
_STEP_MHZ = 15  # of all NVIDIA GPUs of data centres so far
_LOCKED_BELOW = 0.9  # of the top clock: GPUs of some models never boost to it
_LOOK_AGAIN_S = 0.1  # a GPU that has just been given work is on its way up


def supported_clocks(nvml: NvmlLibrary, handle: Handle) -> tuple[tuple[int, ...], bool]:
    """Graphics clocks of a GPU, the highest first, and whether they may be locked.

    Some GPUs list none (GH200, and under hypervisors): then those between their lowest and highest one are taken; the
    driver rounds to the nearest. One that does not tell these either has the clock at which it runs, for good.

    Raises:
        pynvml.NVMLError: If the GPU fails.
    """
    unknown = nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND, nvml.NVML_ERROR_NOT_FOUND
    graphics = nvml.NVML_CLOCK_GRAPHICS

    def listed() -> list[int]:
        memory_mhz = max(nvml.nvmlDeviceGetSupportedMemoryClocks(handle), default=0)
        return [int(clock) for clock in nvml.nvmlDeviceGetSupportedGraphicsClocks(handle, memory_mhz)]

    def between() -> list[int]:
        highest_mhz = int(nvml.nvmlDeviceGetMaxClockInfo(handle, graphics))
        try:
            lowest_mhz = int(nvml.nvmlDeviceGetMinMaxClockOfPState(handle, graphics, 0)[0])
        except (AttributeError, nvml.NVMLError):
            lowest_mhz = highest_mhz // 2  # energy valleys lie above
        return list(range(highest_mhz, max(lowest_mhz, 1) - 1, -_STEP_MHZ))

    for ask in (listed, between):
        try:
            clocks_mhz = ask()
        except nvml.NVMLError as error:
            if error.value not in unknown:
                raise
        else:
            if any(clocks_mhz):
                return tuple(sorted({clock for clock in clocks_mhz if clock > 0}, reverse=True)), True
    try:
        return (max(1, int(nvml.nvmlDeviceGetClockInfo(handle, graphics))),), False
    except nvml.NVMLError as error:
        if error.value not in unknown:
            raise
        return (1,), False


def clock_reasons(nvml: NvmlLibrary, handle: Handle) -> int | None:
    """NVML's bits, 0 where nothing holds the clock down; None where the driver does not tell."""
    for name in _REASONS_FUNCTIONS:
        with contextlib.suppress(AttributeError, nvml.NVMLError):
            return int(getattr(nvml, name)(handle))
    return None


def clock_limits(nvml: NvmlLibrary, handle: Handle) -> frozenset[str]:
    """What holds the clock down now; empty where the driver does not tell."""
    reasons = clock_reasons(nvml, handle) or 0
    return frozenset(limit for bit, limit in _LIMITS.items() if reasons & bit)


def unexplained_clock(nvml: NvmlLibrary, handle: Handle, top_mhz: int) -> str:
    """What shows that the clock is locked: it is low, twice, and nothing explains it. Empty: nothing shows.

    NVML does not tell of locked clocks themselves. A lock near the top clock, and that of an idle GPU, is not seen.
    """
    seen_mhz: list[int] = []
    for wait_s in (0.0, _LOOK_AGAIN_S):
        time.sleep(wait_s)
        try:
            seen_mhz.append(int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_GRAPHICS)))
        except nvml.NVMLError:
            return ""
        if clock_reasons(nvml, handle) != 0 or seen_mhz[-1] >= _LOCKED_BELOW * top_mhz or seen_mhz[-1] != seen_mhz[0]:
            return ""
    return f"it runs at {seen_mhz[0]} of {top_mhz} MHz without a reason, so somebody seems to have locked it there"


def compute_pids(nvml: NvmlLibrary, handle: Handle) -> list[int] | None:
    """Numbers of the processes that compute on a GPU, under MPS too; None where the driver never tells.

    Raises:
        pynvml.NVMLError: If it fails to tell.
    """
    told = [_pids(nvml, handle, name) for name in _PROCESS_FUNCTIONS]
    return None if told[0] is None else [pid for pids in told for pid in pids or ()]


def _pids(nvml: NvmlLibrary, handle: Handle, function: str) -> list[int] | None:
    for version in _PROCESS_VERSIONS:
        try:
            return [int(process.pid) for process in getattr(nvml, function + version)(handle)]
        except AttributeError:  # of pynvml
            continue
        except nvml.NVMLError as error:
            if error.value not in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                raise
    return None


def is_in_module(nvml: NvmlLibrary, handle: Handle) -> bool:
    """Whether the GPU shares a module, and its energy counter, with a CPU (Grace Hopper)."""
    try:
        return bool(nvml.nvmlDeviceGetC2cModeInfoV(handle).isC2cEnabled)
    except (AttributeError, nvml.NVMLError):
        return False
