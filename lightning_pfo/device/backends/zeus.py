"""GPUs through the zeus package (`pip install lightning-pfo[zeus]`): AMD GPUs, and NVIDIA's with the zeusd daemon.

=================  ====================================  ==============================================
GPU                clocks are set by                     everything else is read by
=================  ====================================  ==============================================
NVIDIA, zeusd      zeusd, which has the permission       NVML, as with `gpu=nvml`
NVIDIA             zeus, with this process's permission  NVML
AMD                zeus (amdsmi)                         zeus; present clock and UUID by zeus's amdsmi
=================  ====================================  ==============================================

zeusd is used if ZEUSD_SOCK_PATH or ZEUSD_HOST_PORT is set, as zeus itself does. zeusd does not unlock clocks when a
client dies; our lease and watchdog do, through zeusd. Written for zeus 0.16 (ml.energy/zeus).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning_pfo.core.errors import ClockPermissionError, DeviceError, NotSupportedError
from lightning_pfo.device.backends import nvml
from lightning_pfo.device.safety.leased_gpu import LeasedGpu

_AMD_STEP_MHZ = 25  # amdsmi takes any clock of a range; these are close enough for an energy valley
_AMD_NEVER = (2, 3)  # amdsmi_status_t: not supported, not yet implemented
_NVIDIA_UUID = "GPU-"
_HOW_TO_GET_PERMISSION = (
    "Start zeusd as root on this node and set ZEUSD_SOCK_PATH to its socket (docs/gpus.md), or run as root or with "
    "CAP_SYS_ADMIN"
)


def visible_gpu_count() -> int:
    """Count the GPUs that this process may use: NVIDIA's, else AMD's. 0 without the package."""
    count = nvml.visible_gpu_count()
    if count:
        return count
    try:
        return len(_amd_gpus())
    except DeviceError:
        return 0


def open_zeus_gpu(index: int) -> ZeusNvidiaGpu | ZeusAmdGpu:
    """Open one GPU.

    Args:
        index: Index among the visible GPUs, as CUDA or HIP count.

    Raises:
        DeviceError: If the package is missing, or there is no such GPU.
    """
    _zeus()
    return ZeusNvidiaGpu(index) if nvml.nvml_available() else ZeusAmdGpu(index)


def load() -> None:
    """Import the library, so that it is there when it is needed.

    Raises:
        DeviceError: If it is not installed.
    """
    _zeus()


def unlock_graphics_clock(gpu_uuid: str, found: Mapping[str, int | None]) -> None:
    """Undo a lock that another process has left; see `safety.claim`.

    Args:
        gpu_uuid: The GPU.
        found: What `_found` returned then.

    Raises:
        DeviceError: If there is no such GPU, or it refuses.
    """
    with _project_errors(f"Unlocking the clocks of GPU {gpu_uuid}"):
        if gpu_uuid.startswith(_NVIDIA_UUID):
            _zeus_nvidia_gpu(nvml.node_index_of(gpu_uuid)).reset_gpu_locked_clocks()
            return
        for gpu in _amd_gpus():
            if _amd_uuid(gpu) == gpu_uuid:
                _unlock_amd(gpu, found)
                return
    raise DeviceError(f"Unlocking needs the GPU that was locked; zeus finds no AMD GPU with UUID {gpu_uuid}.")


class ZeusNvidiaGpu(nvml.NvmlGpu):
    """An NVIDIA GPU whose clocks zeus sets, through zeusd where it is configured; with all methods of `Gpu`."""

    backend = "zeus"

    def __init__(self, index: int) -> None:
        """Open a GPU; see `NvmlGpu`.

        Args:
            index: Index among the GPUs that CUDA_VISIBLE_DEVICES leaves, as CUDA counts.

        Raises:
            DeviceError: If there is no such GPU, or zeusd does not answer.
        """
        super().__init__(index)
        try:
            with _project_errors(f"Opening {self.name} with zeus"):
                self._zeus_gpu = _zeus_nvidia_gpu(self.node_index)
        except BaseException:
            self.close()
            raise

    def _lock(self, clock_mhz: int) -> None:
        with _project_errors(f"Locking {self.name} at {clock_mhz} MHz with zeus"):
            self._zeus_gpu.set_gpu_locked_clocks(clock_mhz, clock_mhz)

    def _unlock(self) -> None:
        with _project_errors(f"Unlocking the clocks of {self.name} with zeus"):
            # made anew, after NVML has answered us: zeus cannot if other code has shut it down meanwhile
            self._zeus_gpu = _zeus_nvidia_gpu(self.node_index)
            self._zeus_gpu.reset_gpu_locked_clocks()

    def _was_refused(self, error: DeviceError) -> bool:
        return isinstance(error, ClockPermissionError | NotSupportedError)


class ZeusAmdGpu(LeasedGpu):
    """An AMD GPU, with all methods of `Gpu`."""

    backend = "zeus"

    def __init__(self, index: int) -> None:
        """Open a GPU; its clocks are not touched, unless a crashed job left them locked: then they are restored.

        Args:
            index: Index among the GPUs that HIP_VISIBLE_DEVICES leaves, as HIP counts.

        Raises:
            DeviceError: If there is no such GPU.
        """
        gpus = _amd_gpus()
        if not 0 <= index < len(gpus):
            raise DeviceError(
                f"GPU indices count the visible GPUs from 0; got {index}, but {len(gpus)} are visible to zeus. Use "
                "fewer ranks, make more GPUs visible, or use gpu=emulated_a100."
            )
        self._gpu = gpus[index]
        with _project_errors(f"Opening GPU {index} with zeus"):
            top_mhz, lowest_mhz = max(clocks := self._gpu.get_supported_graphics_clocks()), min(clocks)
            clocks_mhz = tuple(range(top_mhz, lowest_mhz - 1, -_AMD_STEP_MHZ))
            super().__init__(self._gpu.get_name(), _amd_uuid(self._gpu), clocks_mhz)

    @property
    def driver_version(self) -> str:
        """Version of the kernel's driver; empty where it does not tell."""
        try:
            return str(_amdsmi().amdsmi_get_gpu_driver_info(self._gpu.handle)["driver_version"])
        except (AttributeError, KeyError, TypeError, _amdsmi().AmdSmiException):
            return ""

    def _compute_pids(self) -> list[int] | None:
        try:
            processes = _amdsmi().amdsmi_get_gpu_process_list(self._gpu.handle)
            return [int(process["pid"]) for process in processes]
        except _amdsmi().AmdSmiException as error:
            code = getattr(error, "get_error_code", lambda: None)()
            if code in _AMD_NEVER:
                return None
            raise DeviceError(f"Listing the processes on {self.name} failed: {error}.") from error
        except (AttributeError, KeyError, TypeError, ValueError):  # of versions without the list, or with another
            return None

    def _whose_lock(self) -> str:
        found = self._found()
        lowest_mhz, top_mhz = found["min_graphics_clock_mhz"], found["max_graphics_clock_mhz"]
        is_locked = lowest_mhz == top_mhz and len(self._clocks_mhz) > 1
        return f"somebody has locked it at {top_mhz} MHz" if is_locked else ""

    def _found(self) -> dict[str, int | None]:
        info = _amd_clock(self._gpu)
        return {
            "graphics_clock_mhz": int(info["clk"]),
            "min_graphics_clock_mhz": int(info["min_clk"]),
            "max_graphics_clock_mhz": int(info["max_clk"]),
            "power_limit_mw": int(self._gpu.get_power_management_limit()),
        }

    def _lock(self, clock_mhz: int) -> None:
        with _project_errors(f"Locking {self.name} at {clock_mhz} MHz with zeus"):
            self._gpu.set_gpu_locked_clocks(clock_mhz, clock_mhz)

    def _unlock(self) -> None:
        with _project_errors(f"Unlocking the clocks of {self.name} with zeus"):
            _unlock_amd(self._gpu, self._claim.found if self._claim is not None else {})

    def _was_refused(self, error: DeviceError) -> bool:
        return isinstance(error, ClockPermissionError | NotSupportedError)

    def total_energy_mj(self) -> int:
        """Energy since the driver was loaded.

        Raises:
            NotSupportedError: If zeus has found the counter of this GPU to be wrong; power is integrated then.
        """
        with _project_errors(f"Reading the energy counter of {self.name}"):
            return int(self._gpu.get_total_energy_consumption())

    def power_mw(self) -> int:
        """Power drawn now; the driver's average where it does not tell the present one."""
        with _project_errors(f"Reading the power of {self.name}"):
            try:
                return int(self._gpu.get_instant_power_usage())
            except _zeus().ZeusGPUNotSupportedError:
                return int(self._gpu.get_average_power_usage())

    def graphics_clock_mhz(self) -> int:
        """The graphics clock at which the GPU runs now."""
        with _project_errors(f"Reading the clock of {self.name}"):
            return int(_amd_clock(self._gpu)["clk"])

    def clock_limits(self) -> frozenset[str]:
        """Empty: zeus does not tell what holds an AMD GPU back; that a clock is not reached is still seen."""
        return frozenset()

    def temperature_c(self) -> float | None:
        """Temperature of the chip; None where zeus does not tell."""
        try:
            with _project_errors(f"Reading the temperature of {self.name}"):
                return float(self._gpu.get_gpu_temperature())
        except (DeviceError, AttributeError):
            return None

    def close(self) -> None:
        """Restore the clocks. May be called twice."""
        self.restore()


def _zeus() -> Any:
    """`zeus.device.gpu`, imported here so that nobody else needs the package."""
    try:
        import zeus.device.gpu as zeus_gpu
    except ImportError as error:
        raise DeviceError(
            "gpu=zeus needs the package zeus: pip install 'lightning-pfo[zeus]', or use gpu=nvml."
        ) from error
    return zeus_gpu


@contextmanager
def _project_errors(action: str) -> Iterator[None]:
    """Turn zeus's errors into the project's."""
    zeus_gpu = _zeus()
    import httpx
    from zeus.exception import ZeusBaseError

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*SYS_ADMIN.*")  # said by ours, with the remedy, where it fails
            yield
    except zeus_gpu.ZeusGPUNoPermissionError as error:
        raise ClockPermissionError(f"{action} failed: {error}. {_HOW_TO_GET_PERMISSION}.") from error
    except zeus_gpu.ZeusGPUNotSupportedError as error:
        raise NotSupportedError(f"{action} failed: {error}.") from error
    except (ZeusBaseError, httpx.HTTPError) as error:
        raise DeviceError(f"{action} failed: {error}.") from error


def _zeus_nvidia_gpu(node_index: int) -> Any:
    """The zeus object for one GPU, as `zeus.device.get_gpus` makes it, but also where visible devices are UUIDs."""
    from zeus.device.gpu.nvidia import NVIDIAGPU, ZeusdNVIDIAGPU
    from zeus.utils.zeusd import ZeusdClient, ZeusdConfig

    config = ZeusdConfig.from_env()
    return NVIDIAGPU(node_index) if config is None else ZeusdNVIDIAGPU(node_index, ZeusdClient(config))


def _amd_gpus() -> list[Any]:
    with _project_errors("Looking for GPUs with zeus"):
        return list(_zeus().get_gpus().gpus)


def _amdsmi() -> Any:
    from zeus.device.gpu import amd  # its amdsmi, which is a stand-in where ROCm is missing

    return amd.amdsmi


def _amd_clock(gpu: Any) -> dict[str, Any]:
    amdsmi = _amdsmi()
    clock: dict[str, Any] = amdsmi.amdsmi_get_clock_info(gpu.handle, amdsmi.AmdSmiClkType.GFX)
    return clock


def _amd_uuid(gpu: Any) -> str:
    return str(_amdsmi().amdsmi_get_gpu_device_uuid(gpu.handle))


def _unlock_amd(gpu: Any, found: Mapping[str, int | None]) -> None:
    """Back to the range found before; zeus's own reset asks for the range once more, which may be the locked one."""
    lowest_mhz, top_mhz = found.get("min_graphics_clock_mhz"), found.get("max_graphics_clock_mhz")
    if lowest_mhz is None or top_mhz is None:
        gpu.reset_gpu_locked_clocks()
    else:
        gpu.set_gpu_locked_clocks(lowest_mhz, top_mhz)
