"""On what an experiment trains, and which GPU it measures."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.wording import counted
from lightning_pfo.device import GpuConfig
from lightning_pfo.experiment.config import ExperimentConfig


def accelerator_of(config: ExperimentConfig) -> str:
    """Resolve `auto`: GPUs if each rank of this machine gets one, or a share of one, else the CPU."""
    if config.trainer.accelerator != "auto":
        return config.trainer.accelerator
    num_needed = 1 if config.trainer.share_gpus else config.trainer.devices
    return "gpu" if torch.cuda.device_count() >= num_needed else "cpu"


def few_gpus(config: ExperimentConfig) -> str:
    """What follows, in a line, where the machine has some GPUs, but not one for each rank; empty otherwise."""
    num_gpus, num_ranks = torch.cuda.device_count(), config.trainer.devices
    if config.trainer.accelerator == "cpu" or not 0 < num_gpus < num_ranks:
        return ""
    if config.trainer.share_gpus:
        return (
            f"{num_ranks} stages share {counted(num_gpus, 'GPU')} and send their tensors by the host (gloo), to try "
            f"whether they train. No clock is set; times and energies are those of an emulated {config.gpu.model}."
        )
    if config.trainer.accelerator != "auto":
        return ""
    is_modelled = config.gpu.kind in ("auto", "emulated")
    modelled = f", and times, clocks and energies are those of an emulated {config.gpu.model}" if is_modelled else ""
    return (
        f"{num_ranks} stages (trainer.devices) need {num_ranks} GPUs, and this machine has {num_gpus}: the model "
        f"trains on the CPU{modelled}. Use trainer.devices={num_gpus} to train on the GPU, or "
        "trainer.share_gpus=true to try the stages there."
    )


def is_emulated(config: ExperimentConfig) -> bool:
    """Whether neither the training nor the GPU that is measured needs a driver, whose state forks cannot share."""
    return accelerator_of(config) == "cpu" and config.gpu.kind == "emulated"


def gpu_for(config: ExperimentConfig) -> GpuConfig:
    """The GPU to measure. Trained on the CPU, or on shares of GPUs, `gpu=auto` is emulated: none would be one's own."""
    if config.gpu.kind == "auto" and (accelerator_of(config) == "cpu" or config.trainer.share_gpus):
        return dataclasses.replace(config.gpu, kind="emulated")
    return config.gpu


def check_shared_gpus(config: ExperimentConfig) -> None:
    """Check that ranks that share GPUs do not set clocks, of which each would undo the others'.

    Raises:
        ConfigurationError: If they would.
    """
    if config.trainer.share_gpus and config.gpu.kind not in ("auto", "emulated"):
        raise ConfigurationError(
            "Ranks that share a GPU (trainer.share_gpus) set no clocks and measure nothing of it; got "
            f"gpu.kind={config.gpu.kind}. Use gpu=emulated_a100."
        )


def devices_of_ranks(config: ExperimentConfig) -> dict[str, Any]:
    """What the strategy is told of devices: nothing, unless ranks share GPUs, in turn, and talk by gloo."""
    num_gpus = torch.cuda.device_count()
    if not config.trainer.share_gpus:
        return {}
    if accelerator_of(config) == "cpu":
        devices = [torch.device("cpu")] * config.trainer.devices
    else:
        devices = [torch.device("cuda", rank % num_gpus) for rank in range(config.trainer.devices)]
    return {"parallel_devices": devices, "process_group_backend": "gloo"}
