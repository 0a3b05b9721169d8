"""What a Trainer may ask for that a pipeline cannot do: refused before training with a way out, or left out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelPruning
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.coupling import check_optimizer
from lightning_pfo.strategy.model.layers import check_compiler
from lightning_pfo.strategy.model.tracing.placeholders import check_values
from lightning_pfo.strategy.parallel.patches import Patches
from lightning_pfo.strategy.trainer.callbacks.weight_averaging import check_averages
from lightning_pfo.strategy.trainer.precision import check_precision


def check_configuration(
    trainer: pl.Trainer,
    device: torch.device,
    *,
    synchronises_batch_norm: bool,
    is_divided: bool,
    divides_layers: bool,
    compiles: bool,
    shards_checkpoints: bool = False,
) -> None:
    """Check the Trainer's options.

    Args:
        trainer: The Trainer.
        device: This rank's device.
        synchronises_batch_norm: Whether `sync_batchnorm=True` was given.
        is_divided: Whether this rank holds a part of the module.
        divides_layers: Whether layers are divided over processes, by tensor parallelism or FSDP2.
        compiles: Whether layers are compiled.
        shards_checkpoints: Whether checkpoints are written in shards.

    Raises:
        ConfigurationError: If they cannot work on a pipeline.
    """
    if synchronises_batch_norm:
        raise ConfigurationError(
            "pfo_pipeline runs batch norm on microbatches, each replica with its own; got sync_batchnorm=True. Leave "
            "it out, or use a norm that does not look at other samples, such as nn.GroupNorm or nn.LayerNorm."
        )
    check_precision(trainer.precision_plugin)
    if compiles:
        check_compiler(device)
    check_averages(trainer, divided=divides_layers, sharded_checkpoints=shards_checkpoints)
    if is_divided and any(isinstance(callback, ModelPruning) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        raise ConfigurationError(
            "ModelPruning reads and replaces the weights of all layers, but a pipeline rank holds those of its own "
            "stages. Prune the checkpoint on one device, or leave the callback out."
        )
    if is_divided and any(map(_serves, trainer.callbacks)):  # type: ignore[attr-defined]
        raise ConfigurationError(
            "ServableModuleValidator calls the whole module in a process that it starts on the first rank, but a "
            "pipeline rank holds the layers of its own stages. Leave the callback out, and validate on one device "
            "before (fast_dev_run=True); or serve what trainer.strategy.gather_module() gives after fit."
        )


def _serves(callback: object) -> bool:
    """Whether a callback is `ServableModuleValidator`, whose module imports what few have installed (requests)."""
    return any(kind.__name__ == "ServableModuleValidator" for kind in type(callback).__mro__)


def check_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Check that optimizers can make their steps from the parameters of one rank; warn of those that make others so.

    Raises:
        ConfigurationError: If not.
    """
    for optimizer in optimizers:
        if warning := check_optimizer(optimizer, "trainer.strategy.grad_norm()"):
            rank_zero_warn(f"pfo_pipeline: {warning}")


def set_example_aside(module: pl.LightningModule, patches: Patches) -> None:
    """Take `example_input_array` away, with which Lightning's summaries and loggers call the whole module."""
    example = module.example_input_array
    if example is None:
        return
    module.example_input_array = None
    patches.callback(setattr, module, "example_input_array", example)
    rank_zero_info(
        "pfo_pipeline: example_input_array is not used while the model is split, because no process can call all "
        "of it: summaries have no sizes of inputs and outputs, and loggers no graph."
    )


def refuse_missing_values(patches: Patches) -> None:
    """Let `self.log` in hooks refuse what comes of layers of other ranks: Lightning would at the end of the run.

    Args:
        patches: Undoes it.
    """
    ordinary = pl.LightningModule.log

    @wraps(ordinary)
    def log(module: pl.LightningModule, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        check_values(value)
        ordinary(module, name, value, *args, **kwargs)

    patches.set(pl.LightningModule, "log", log)
