"""A stand-in for AMD's `amdsmi`, with what the zeus package calls; put its folder first on PYTHONPATH.

Two GPUs of 500 to 2100 MHz that draw 300 W. HIP counts them in the other order, as on some nodes. The clock range lies
in the file FAKE_AMDSMI_STATE, so that all processes see the same GPUs, and every change is appended to FAKE_AMDSMI_LOG.
FAKE_AMDSMI_SCENARIO: normal, no_permission. FAKE_AMDSMI_PROCESSES: processes that compute on the GPUs, or !CODE: they
cannot be listed (default: this amdsmi has no such list).
"""

import enum
import json
import os
import time
from pathlib import Path

_RANGE_MHZ = (500, 2100)
_POWER_W = 300


class AmdSmiException(Exception):  # noqa: N818
    pass


class AmdSmiLibraryException(AmdSmiException):
    def __init__(self, code):
        super().__init__(code)
        self._code = code

    def get_error_code(self):
        return self._code

    def get_error_info(self):
        return f"AMDSMI_STATUS {self._code}"


class AmdSmiInitFlags(enum.IntEnum):
    INIT_AMD_GPUS = 2


class AmdSmiClkType(enum.IntEnum):
    GFX = 0
    MEM = 4


def amdsmi_init(flag):
    pass


def amdsmi_shut_down():
    pass


def amdsmi_get_processor_handles():
    return ["gpu0", "gpu1"]


def amdsmi_get_gpu_enumeration_info(handle):
    return {"hip_id": {"gpu0": 1, "gpu1": 0}[handle]}


def amdsmi_get_gpu_asic_info(handle):
    return {"market_name": f"Fake Instinct ({handle})"}


def amdsmi_get_gpu_device_uuid(handle):
    return f"{handle}-74a0-0000-1000-80a5"


def amdsmi_get_power_cap_info(handle):
    return {
        "power_cap": 750_000_000,
        "min_power_cap": 0,
        "max_power_cap": 750_000_000,
        "default_power_cap": 750_000_000,
    }


def amdsmi_get_power_info(handle):
    return {"current_socket_power": _POWER_W, "average_socket_power": "N/A"}


def amdsmi_get_energy_count(handle):
    return {"energy_accumulator": int(time.monotonic() * _POWER_W * 1e6 / 15.3), "counter_resolution": 15.3}


def amdsmi_get_clock_info(handle, clock_type):
    if clock_type is AmdSmiClkType.MEM:
        return {"clk": 1300, "min_clk": 900, "max_clk": 1300}
    lowest_mhz, top_mhz = _ranges().get(handle, _RANGE_MHZ)
    return {"clk": top_mhz, "min_clk": lowest_mhz, "max_clk": top_mhz}


if "FAKE_AMDSMI_PROCESSES" in os.environ:

    def amdsmi_get_gpu_process_list(handle):
        told = os.environ["FAKE_AMDSMI_PROCESSES"]
        if told.startswith("!"):
            raise AmdSmiLibraryException(int(told[1:]))
        return [{"pid": int(pid)} for pid in told.split(",") if pid]


def amdsmi_set_gpu_clk_range(handle, min_clk_value, max_clk_value, clk_type):
    if os.environ.get("FAKE_AMDSMI_SCENARIO") == "no_permission":
        raise AmdSmiLibraryException(10)
    assert clk_type is AmdSmiClkType.GFX
    with Path(os.environ["FAKE_AMDSMI_LOG"]).open("a") as log:
        log.write(f"{os.getpid()} {handle} {min_clk_value} {max_clk_value}\n")
    state = Path(os.environ["FAKE_AMDSMI_STATE"])
    state.write_text(json.dumps(_ranges() | {handle: (min_clk_value, max_clk_value)}))


def _ranges():
    state = Path(os.environ["FAKE_AMDSMI_STATE"])
    return json.loads(state.read_text()) if state.exists() else {}
