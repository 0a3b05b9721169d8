"""GPUs: one protocol, real ones through NVML, a live emulated one, and safe control of their clocks."""

from lightning_pfo.device.clocks.controller import ClockController
from lightning_pfo.device.config import GpuConfig, gpu_config_from, known_gpu_configs, load_gpu_config
from lightning_pfo.device.emulated.gpu import EmulatedGpu
from lightning_pfo.device.emulated.work import WorkScale, fit_work_scale
from lightning_pfo.device.gpu import Gpu
from lightning_pfo.device.open import open_gpu

__all__ = [
    "ClockController",
    "EmulatedGpu",
    "Gpu",
    "GpuConfig",
    "WorkScale",
    "fit_work_scale",
    "gpu_config_from",
    "known_gpu_configs",
    "load_gpu_config",
    "open_gpu",
]
