"""Real NVIDIA GPUs through NVML."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from lightning_pfo.core.errors import DeviceError, NotSupportedError
from lightning_pfo.device.backends import nvml_questions as questions
from lightning_pfo.device.backends.nvml_library import (
    NO_PERMISSION,
    Handle,
    NvmlLibrary,
    library,
    project_errors,
    text,
)
from lightning_pfo.device.backends.visible_gpus import visible_gpus
from lightning_pfo.device.safety.leased_gpu import LeasedGpu, warn_once

logger = logging.getLogger(__name__)

_UNUSABLE = {NO_PERMISSION, 15, 16}  # codes of GPUs that are there, but not for us
_ABSENT = {9, 12}  # codes of nvmlInit on a machine without an NVIDIA GPU
_SCOPE_OF_THE_GPU = 0
_REFUSED = {2, 3, 4, 13, 15}  # codes after which the driver has certainly not done what was asked


def load() -> None:
    """Import NVML's library, so that it is there when it is needed.

    Raises:
        ImportError: If it is not installed.
    """
    library()


def visible_gpu_count() -> int:
    """Count the GPUs that this process may use: those NVML finds and CUDA_VISIBLE_DEVICES leaves. 0 without NVML."""
    try:
        pynvml = library()
        pynvml.nvmlInit()
    except ImportError:
        return 0
    except pynvml.NVMLError as error:
        if int(error.value) not in _ABSENT:
            logger.warning("NVML is installed but does not work: %s.", error)
        return 0
    try:
        return len(_visible_handles(pynvml))
    except pynvml.NVMLError as error:
        logger.warning("NVML is installed but cannot list GPUs: %s.", error)
        return 0
    finally:
        _leave(pynvml)


def _leave(pynvml: NvmlLibrary) -> None:
    """Leave NVML; what is to be done is done by then, so that an error is told only."""
    try:
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        logger.warning("NVML could not be left: %s.", error)


def node_index_of(gpu_uuid: str) -> int:
    """Index of a GPU among all GPUs of the node.

    Raises:
        DeviceError: If there is no such GPU.
    """
    pynvml = library()
    with project_errors(f"Looking for GPU {gpu_uuid}"):
        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByUUID(gpu_uuid)))
        finally:
            _leave(pynvml)


def nvml_available() -> bool:
    """Whether this process may use at least one NVIDIA GPU."""
    return visible_gpu_count() > 0


def _visible_handles(pynvml: NvmlLibrary) -> list[Any]:
    """Handles of the GPUs in the order of CUDA_VISIBLE_DEVICES; see `visible_gpus`.

    For a MIG instance it is the GPU that it is part of: clocks and energy are known of the whole GPU only. NVML counts
    in PCI order; CUDA does so too on nodes of equal GPUs, or under CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    handles = _usable_handles(pynvml)
    uuids = [text(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]

    def uuid_of_mig(mig_uuid: str) -> str | None:
        try:
            instance = pynvml.nvmlDeviceGetHandleByUUID(mig_uuid)
            return text(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance)))
        except pynvml.NVMLError:
            return None

    return [handles[index] for index in visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), uuids, uuid_of_mig)]


def _usable_handles(pynvml: NvmlLibrary) -> list[Any]:
    """Handles of the GPUs that CUDA counts: not of those that a batch system keeps from this job, nor of lost ones."""
    handles = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            handles.append(pynvml.nvmlDeviceGetHandleByIndex(index))
        except pynvml.NVMLError as error:
            if int(error.value) not in _UNUSABLE:
                raise
            if int(error.value) != NO_PERMISSION:
                warn_once(f"GPU {index} of this node is left out: NVML says {str(error)!r}.")
    return handles


def unlock_graphics_clock(gpu_uuid: str, found: Mapping[str, int | None]) -> None:
    """Undo a lock of the graphics clock that another process has left; see `safety.claim`.

    Args:
        gpu_uuid: The GPU.
        found: Its state before; not needed here.

    Raises:
        DeviceError: If there is no such GPU, or it refuses.
    """
    pynvml = library()
    with project_errors(f"Unlocking the clocks of GPU {gpu_uuid}"):
        pynvml.nvmlInit()
        try:
            pynvml.nvmlDeviceResetGpuLockedClocks(pynvml.nvmlDeviceGetHandleByUUID(gpu_uuid))
        finally:
            _leave(pynvml)


class NvmlGpu(LeasedGpu):
    """A real NVIDIA GPU, with all methods of `Gpu`."""

    backend = "nvml"

    def __init__(self, index: int) -> None:
        """Open a GPU; its clocks are not touched, unless a crashed job left them locked: then they are restored.

        Args:
            index: Index among the GPUs that CUDA_VISIBLE_DEVICES leaves, as CUDA counts.

        Raises:
            DeviceError: If there is no such GPU, or NVML does not work.
        """
        try:
            self._nvml = library()
        except ImportError as error:
            raise DeviceError("NVML needs the package nvidia-ml-py; install it or use gpu=emulated_a100.") from error
        with project_errors("Starting NVML"):
            self._nvml.nvmlInit()
        self._is_open = True
        try:
            with project_errors(f"Opening GPU {index}"):
                handles = _visible_handles(self._nvml)
                if not 0 <= index < len(handles):
                    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
                    raise DeviceError(
                        f"GPU indices count the visible GPUs from 0; got {index}, but {len(handles)} are visible "
                        f"(CUDA_VISIBLE_DEVICES: {visible!r}). Use fewer ranks, make more GPUs visible, or use "
                        "gpu=emulated_a100."
                    )
                name = text(self._nvml.nvmlDeviceGetName(handles[index]))
                uuid = text(self._nvml.nvmlDeviceGetUUID(handles[index]))
                self._handle = Handle(uuid, handles[index])
            with project_errors(f"Asking {name} for the clocks that it supports"):
                clocks_mhz, self._tells_clocks = questions.supported_clocks(self._nvml, self._handle)
                self._is_in_module = questions.is_in_module(self._nvml, self._handle)
        except BaseException:
            self._leave()
            raise
        super().__init__(name, uuid, clocks_mhz)
        if self.is_split:
            logger.warning(
                "%s is split into MIG instances: its clock and its energy are those of all instances together, and its "
                "clocks are never set.",
                self._name,
            )

    @property
    def driver_version(self) -> str:
        """Version of the driver, such as 570.86.15; empty where it does not tell."""
        try:
            return text(self._nvml.nvmlSystemGetDriverVersion())
        except self._nvml.NVMLError:
            return ""

    @property
    def node_index(self) -> int:
        """Index among all GPUs of the node, in PCI order, whatever CUDA_VISIBLE_DEVICES leaves."""
        with project_errors(f"Asking for the index of {self._name}"):
            return int(self._nvml.nvmlDeviceGetIndex(self._handle))

    def _lock(self, clock_mhz: int) -> None:
        with project_errors(f"Locking {self._name} at {clock_mhz} MHz"):
            self._nvml.nvmlDeviceSetGpuLockedClocks(self._handle, clock_mhz, clock_mhz)

    def _unlock(self) -> None:
        with project_errors(f"Unlocking the clocks of {self._name}"):
            self._nvml.nvmlDeviceResetGpuLockedClocks(self._handle)

    def _was_refused(self, error: DeviceError) -> bool:
        return getattr(error.__cause__, "value", None) in _REFUSED

    @property
    def is_split(self) -> bool:
        """Whether it is split into MIG instances, of which CUDA shows each as a GPU."""
        try:
            return bool(self._nvml.nvmlDeviceGetMigMode(self._handle)[0])
        except self._nvml.NVMLError:
            return False

    def _why_never(self) -> str:
        if self.is_split:
            return "it is split into MIG instances, which others may use, and a clock is that of all of them"
        return "" if self._tells_clocks else "its driver does not tell which clocks it supports"

    def _compute_pids(self) -> list[int] | None:
        with project_errors(f"Listing the processes on {self._name}"):
            return questions.compute_pids(self._nvml, self._handle)

    def _whose_lock(self) -> str:
        return questions.unexplained_clock(self._nvml, self._handle, self._clocks_mhz[0])

    def _found(self) -> dict[str, int | None]:
        """What the driver tells of the settings that a lease is about; NVML cannot tell locked clocks."""
        nvml, handle = self._nvml, self._handle
        questions: dict[str, Callable[[], Any]] = {
            "graphics_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_GRAPHICS),
            "memory_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            "power_limit_mw": lambda: nvml.nvmlDeviceGetPowerManagementLimit(handle),
        }
        state: dict[str, int | None] = {}
        for name, ask in questions.items():
            try:
                state[name] = int(ask())
            except nvml.NVMLError:
                state[name] = None
        return state

    def total_energy_mj(self) -> int:
        """Energy since the driver was loaded; the counter advances every 20 to 100 ms.

        Raises:
            NotSupportedError: If the GPU has no energy counter of its own: older than Volta, or part of a module with a
                CPU (Grace Hopper), whose counter counts both. Power is integrated then.
        """
        if self._is_in_module:
            raise NotSupportedError(f"The energy counter of {self._name} counts the CPU of its module too.")
        with project_errors(f"Reading the energy counter of {self._name}"):
            return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))

    def power_mw(self) -> int:
        """Power drawn now; where the driver tells only that, averaged over the last second."""
        with project_errors(f"Reading the power of {self._name}"):
            instant_mw = self._instant_power_mw()
            return int(self._nvml.nvmlDeviceGetPowerUsage(self._handle)) if instant_mw is None else instant_mw

    def _instant_power_mw(self) -> int | None:
        """What nvmlDeviceGetPowerUsage returns up to GA100; of newer GPUs it returns an average (nvml.h)."""
        try:
            # the scope is that of the GPU, where a module with a CPU has others
            (field,) = self._nvml.nvmlDeviceGetFieldValues(
                self._handle, [(self._nvml.NVML_FI_DEV_POWER_INSTANT, _SCOPE_OF_THE_GPU)]
            )
        except self._nvml.NVMLError:
            return None
        return int(field.value.uiVal) if field.nvmlReturn == self._nvml.NVML_SUCCESS else None

    def graphics_clock_mhz(self) -> int:
        """The graphics clock at which the GPU runs now."""
        with project_errors(f"Reading the clock of {self._name}"):
            return int(self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_GRAPHICS))

    def clock_limits(self) -> frozenset[str]:
        """What holds the clock down now; empty where the driver does not tell."""
        return questions.clock_limits(self._nvml, self._handle)

    def temperature_c(self) -> float | None:
        """Temperature of the chip; None where the driver does not tell."""
        try:
            return float(self._nvml.nvmlDeviceGetTemperature(self._handle, self._nvml.NVML_TEMPERATURE_GPU))
        except self._nvml.NVMLError:
            return None

    def close(self) -> None:
        """Restore the clocks and leave NVML. May be called twice."""
        if self._is_open:
            try:
                self.restore()
            finally:
                self._leave()

    def _leave(self) -> None:
        self._is_open = False
        _leave(self._nvml)
