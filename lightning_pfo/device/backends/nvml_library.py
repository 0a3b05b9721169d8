"""NVML's functions through pynvml, which only this module imports, and only when a GPU is asked for.

A call that fails is made once more where that may help: `NvmlLibrary`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from lightning_pfo.core.errors import ClockPermissionError, DeviceError, NotSupportedError

_HOW_TO_GET_PERMISSION = (
    "Locking GPU clocks needs root or the capability CAP_SYS_ADMIN, in a container too (docker: --cap-add=SYS_ADMIN). "
    "Run with it; or let root start zeusd on this node, set ZEUSD_SOCK_PATH to its socket, and use gpu=zeus (pip "
    "install 'lightning-pfo[zeus]'; docs/gpus.md); or try the clock control on an emulated GPU (gpu=emulated_a100)"
)
UNINITIALIZED, NO_PERMISSION = 1, 4  # nvml.h, nvmlReturn_t
_PASSING = frozenset((10, 19, 20, 21, 23, 999))  # timeout, in use, no memory, no data, no resources, unknown
# code -> error class and what to do about it
_ERRORS: dict[int, tuple[type[DeviceError], str]] = {
    3: (
        NotSupportedError,
        "This GPU or driver cannot do it; Volta and newer data-centre and workstation GPUs can",
    ),
    NO_PERMISSION: (ClockPermissionError, _HOW_TO_GET_PERMISSION),
    6: (DeviceError, "No such GPU; compare CUDA_VISIBLE_DEVICES with the output of nvidia-smi -L"),
    9: (DeviceError, "The NVIDIA driver is not loaded; check that nvidia-smi works"),
    12: (DeviceError, "libnvidia-ml.so.1 was not found; install the NVIDIA driver or use gpu=emulated_a100"),
    13: (NotSupportedError, "The NVIDIA driver is too old to know this call; update it"),
    15: (DeviceError, "The GPU has fallen off the bus; reset it or reboot the machine"),
    16: (DeviceError, "The GPU must be reset before it can be used again (nvidia-smi --gpu-reset)"),
    18: (DeviceError, "Driver and library have different versions; reboot the machine after a driver update"),
}
_PAUSE_S = 0.05  # between a call that failed for no reason told and the next


@dataclass
class Handle:
    """NVML's handle of a GPU, which may be another one when NVML is started anew."""

    gpu_uuid: str
    raw: Any


class NvmlLibrary:
    """pynvml with all its names; a function that fails is called once more where that may help.

    - Other code of this process may shut NVML down once too often (code 1): it is started again. Otherwise nobody could
      unlock the clocks until the process ends.
    - The driver fails now and then for a reason that passes or that it does not tell (code 999), a single time.

    What pynvml cannot read as a text is returned as far as it can be read.
    """

    def __init__(self, pynvml: ModuleType) -> None:
        self._pynvml = pynvml

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._pynvml, name)
        if name.startswith("nvml") and callable(found):
            found = functools.partial(self._call, found)
        self.__dict__[name] = found  # asked for once
        return found

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*map(_raw, arguments))
        except UnicodeDecodeError as error:
            return error.object.decode(errors="replace")
        except self._pynvml.NVMLError as error:
            code = int(error.value)
            if code != UNINITIALIZED and code not in _PASSING:
                raise
        if code in _PASSING:
            time.sleep(_PAUSE_S)
        else:
            self._pynvml.nvmlInit()
            for argument in arguments:
                if isinstance(argument, Handle):
                    argument.raw = self._pynvml.nvmlDeviceGetHandleByUUID(argument.gpu_uuid)
        return function(*map(_raw, arguments))


def _raw(argument: Any) -> Any:
    return argument.raw if isinstance(argument, Handle) else argument


@functools.cache
def library() -> NvmlLibrary:
    """The library.

    Raises:
        ImportError: If pynvml is not installed.
    """
    import pynvml  # here, so that machines without NVIDIA software never need it

    return NvmlLibrary(pynvml)


@contextmanager
def project_errors(action: str) -> Iterator[None]:
    """Turn NVML's errors into the project's, saying what was attempted and what to do."""
    try:
        yield
    except library().NVMLError as error:
        code = int(error.value)
        error_class, advice = _ERRORS.get(code, (DeviceError, "See the description of this code in NVML's manual"))
        raise error_class(f"{action} failed: NVML says {str(error)!r} (code {code}). {advice}.") from error


def text(value: str | bytes) -> str:
    """Older pynvml versions return bytes."""
    return value.decode() if isinstance(value, bytes) else value
