"""Lightning's callbacks that average weights (EMA, SWA) on a pipeline.

They copy the whole module before it is split, so the copy is split in the same way: each rank averages its own layers.
In a checkpoint the averages are put together again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.modules import tensors_of
from lightning_pfo.strategy.compat.patches import Patches, unwarned
from lightning_pfo.strategy.model.ownership import move_local_tensors
from lightning_pfo.strategy.trainer.callbacks.compat import average_of

_AVERAGING = tuple(
    getattr(callbacks, name) for name in ("StochasticWeightAveraging", "WeightAveraging") if hasattr(callbacks, name)
)  # Lightning 2.5 has not both


def _averages(trainer: pl.Trainer) -> Iterator[tuple[Any, nn.Module]]:
    """The callbacks that average weights, and their copies of the module."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, _AVERAGING) and (average := average_of(callback)) is not None:
            yield callback, average.module if isinstance(average, AveragedModel) else average


def check_averages(trainer: pl.Trainer, *, divided: bool, sharded_checkpoints: bool) -> None:
    """Check that weights can be averaged.

    Args:
        trainer: The Trainer with its callbacks.
        divided: Whether layers are divided over processes (tensor parallelism, FSDP2).
        sharded_checkpoints: Whether checkpoints are written in shards.

    Raises:
        ConfigurationError: If not.
    """
    for callback, _ in _averages(trainer):
        name = type(callback).__name__
        if divided:
            raise ConfigurationError(
                f"{name} copies the module before its layers are divided over processes, so the copy does not fit. Use "
                f"tensor_parallel_size=1 and fully_shard=False with it."
            )
        if sharded_checkpoints:
            raise ConfigurationError(
                f"{name} puts its averages into the checkpoint as one state dict. Use "
                f"save_distributed_checkpoint=False."
            )


def split_averages(trainer: pl.Trainer, module: nn.Module, patches: Patches) -> None:
    """Replace in all averages what is a placeholder in `module`; to be called after its split.

    Until `patches` is closed, averages can be moved to a device, and torch does not warn when one is loaded.
    """
    for callback, average in _averages(trainer):
        if isinstance(callback, StochasticWeightAveraging):
            reset = _resetter(callback.reset_batch_norm_and_save_state)
            patches.set(callback, "reset_batch_norm_and_save_state", reset)
        for path, own in module.named_modules():
            other = tensors_of(average.get_submodule(path))
            for name, parameter in own.named_parameters(recurse=False):
                if parameter.is_meta:
                    other.parameters[name] = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
            for name, buffer in own.named_buffers(recurse=False):
                if buffer.is_meta:
                    other.buffers[name] = buffer
        patches.set(average, "to", _mover(average))
    # an average is loaded from a checkpoint as a whole; torch warns of each value that a placeholder does not take
    patches.enter_context(unwarned(".*copying from a non-meta parameter in the checkpoint to a meta.*"))


def _mover(average: nn.Module) -> Callable[..., nn.Module]:
    def to(device: torch.device | str) -> nn.Module:
        move_local_tensors(average, torch.device(device))
        return average

    return to


def _resetter(reset: Callable[[pl.LightningModule], None]) -> Callable[[pl.LightningModule], None]:
    """Reset the statistics of batch norms that the rank holds; those of others stay placeholders."""

    def reset_own(module: pl.LightningModule) -> None:
        placeholders = [
            (tensors_of(part).buffers, name, buffer)
            for part in module.modules()
            for name, buffer in part.named_buffers(recurse=False)
            if buffer.is_meta
        ]
        reset(module)
        for buffers, name, buffer in placeholders:
            buffers[name] = buffer

    return reset_own


def gather_averages(
    trainer: pl.Trainer, checkpoint: dict[str, Any], gather: Callable[[nn.Module], dict[str, Any]]
) -> None:
    """Complete the averages that callbacks have put into a checkpoint; a collective call.

    Args:
        trainer: The Trainer with its callbacks.
        checkpoint: Changed in place.
        gather: Collects the whole state dict of a split module.
    """
    for callback, average in _averages(trainer):
        if isinstance(callback, StochasticWeightAveraging):
            state = checkpoint.get("callbacks", {}).get(callback.state_key)
            if state is not None:
                state["average_model_state"] = gather(average)
        elif "averaging_state" in checkpoint:
            checkpoint["state_dict"] = gather(average)
