"""Open the GPU that a setting names."""

from __future__ import annotations

import logging

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.device.backends import nvml, zeus
from lightning_pfo.device.backends.dry_run import DryRunGpu
from lightning_pfo.device.config import GpuConfig, load_gpu_config
from lightning_pfo.device.emulated.gpu import EmulatedGpu
from lightning_pfo.device.gpu import Gpu

logger = logging.getLogger(__name__)

_said: list[str] = []  # the warning comes once per process


def open_gpu(choice: str | GpuConfig | Gpu, index: int, *, num_gpus: int | None = None) -> Gpu:
    """Open one GPU.

    Args:
        choice: A name of conf/gpu (`auto`, `nvml`, `emulated_a40`, ...), a configuration, or a GPU already opened.
        index: Index of the GPU on this node, as CUDA_VISIBLE_DEVICES numbers them (usually the local rank).
        num_gpus: How many GPUs the ranks of this node open, if known. `auto` then takes NVML only if there are as many,
            so that ranks do not mix real and emulated GPUs.

    Raises:
        ConfigurationError: If the choice is unknown, or there are fewer real GPUs than ranks.
        DeviceError: If the GPU cannot be opened.
    """
    if not isinstance(choice, (str, GpuConfig)):
        return choice
    config = load_gpu_config(choice) if isinstance(choice, str) else choice
    if config.kind == "emulated":
        return EmulatedGpu(config, index=index)
    num_found = num_visible(config)
    num_needed = max(index + 1, num_gpus or 0)
    if config.kind == "auto" and (num_found == 0 or (num_gpus is not None and num_found < num_gpus)):
        if index == 0:  # the other ranks of this node need not repeat it
            _say_emulated(config.model, num_found, num_needed)
        return EmulatedGpu(config, index=index)
    if 0 < num_found < num_needed:  # without any, opening says why
        seer = "zeus" if config.kind == "zeus" else "NVML"
        raise ConfigurationError(
            f"Each rank needs a GPU of its own: {num_needed} ranks on this node, but {seer} sees {num_found} "
            f"(CUDA_VISIBLE_DEVICES counts). Use {num_found} ranks per node, or an emulated GPU "
            "such as gpu=emulated_a100."
        )
    gpu = zeus.open_zeus_gpu(index) if config.kind == "zeus" else nvml.NvmlGpu(index)
    gpu.shares = config.share
    return DryRunGpu(gpu) if config.dry_run else gpu


def num_visible(config: GpuConfig) -> int:
    """How many real GPUs there are to open, as CUDA_VISIBLE_DEVICES leaves them."""
    return zeus.visible_gpu_count() if config.kind == "zeus" else nvml.visible_gpu_count()


def _say_emulated(model: str, num_found: int, num_needed: int) -> None:
    found = "no GPU" if num_found == 0 else f"only {num_found} of the {num_needed} GPUs needed"
    if not _said:
        _said.append(model)
        logger.warning(
            "NVML sees %s: using an emulated %s. Times, clocks and energies are modelled, not measured.", found, model
        )
