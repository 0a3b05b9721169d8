"""GPUs: one protocol, real ones and an emulated one, and safe control of their clocks. Knows nothing of pipelines.

Read in this order:

1. `gpu`: what the project asks of a GPU; `time`: where its moments come from; `config`: the settings that choose one,
   and shape an emulated one, read by `conf_files`;
2. `clocks`: setting clocks off the training thread; `energy`: who used the energy between a counter's ticks;
3. `safety`: clocks are restored however a process ends; `backends`: real GPUs, built on it;
4. `emulated`: a GPU that is only modelled;
5. `open`: from a setting to a GPU; `report`: what a GPU can do.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_pfo.device.clocks.controller import ClockController
    from lightning_pfo.device.config import GpuConfig, gpu_config_from, known_gpu_configs, load_gpu_config
    from lightning_pfo.device.emulated.cluster import ClusterConfig, known_cluster_configs, load_cluster_config
    from lightning_pfo.device.emulated.gpu import EmulatedGpu
    from lightning_pfo.device.emulated.work import WorkScale, fit_work_scale
    from lightning_pfo.device.gpu import Gpu
    from lightning_pfo.device.open import open_gpu

_MODULES = {
    "clocks.controller": ("ClockController",),
    "config": ("GpuConfig", "gpu_config_from", "known_gpu_configs", "load_gpu_config"),
    "emulated.cluster": ("ClusterConfig", "known_cluster_configs", "load_cluster_config"),
    "emulated.gpu": ("EmulatedGpu",),
    "emulated.work": ("WorkScale", "fit_work_scale"),
    "gpu": ("Gpu",),
    "open": ("open_gpu",),
}

__all__ = [
    "ClockController",
    "ClusterConfig",
    "EmulatedGpu",
    "Gpu",
    "GpuConfig",
    "WorkScale",
    "fit_work_scale",
    "gpu_config_from",
    "known_cluster_configs",
    "known_gpu_configs",
    "load_cluster_config",
    "load_gpu_config",
    "open_gpu",
]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():  # when asked for: the watchdog needs none of them, and starts the sooner
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
