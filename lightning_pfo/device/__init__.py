"""GPUs: one protocol, real ones and an emulated one, and safe control of their clocks. Knows nothing of pipelines.

Read in this order:

1. `gpu`: what the project asks of a GPU; `time`: where its moments come from; `config`: the settings that choose one,
   and shape an emulated one, read by `conf_files`;
2. `clocks`: setting clocks off the training thread; `energy`: who used the energy between a counter's ticks;
3. `safety`: clocks are restored however a process ends; `backends`: real GPUs, built on it;
4. `emulated`: a GPU that is only modelled;
5. `open`: from a setting to a GPU; `report`: what a GPU can do.
"""

from lightning_pfo.device.clocks.controller import ClockController
from lightning_pfo.device.config import GpuConfig, gpu_config_from, known_gpu_configs, load_gpu_config
from lightning_pfo.device.emulated.cluster import ClusterConfig, known_cluster_configs, load_cluster_config
from lightning_pfo.device.emulated.gpu import EmulatedGpu
from lightning_pfo.device.emulated.work import WorkScale, fit_work_scale
from lightning_pfo.device.gpu import Gpu
from lightning_pfo.device.open import open_gpu

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
