"""Who looks at what a step leaves: hooks of the user's module and of callbacks."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.trainer.compat import skips_backward

_LOOK_AT_NOTHING = ("lightning.", "lightning_pfo.")
"""Callbacks of these packages do not look at outputs, but at the loss, but for what a `LambdaCallback` is given."""


def outputs_are_wanted(module: pl.LightningModule, hook: str) -> bool:
    """Whether somebody may look at what a step returns: it is not sent to all ranks for nothing.

    Args:
        module: The user's module, in a run.
        hook: That which is given the outputs.
    """
    if _has(hook, module):
        return True
    for callback in _callbacks(module.trainer):
        is_users = not type(callback).__module__.startswith(_LOOK_AT_NOTHING)
        if hook in vars(callback) or (is_users and _has(hook, callback, pl.Callback)):
            return True
    return False


def silence_writers(trainer: pl.Trainer, patches: Patches) -> None:
    """Let prediction writers write nothing: another rank of the pipeline has the same predictions."""

    def write_nothing(*args: Any, **kwargs: Any) -> None:
        pass

    for callback in _callbacks(trainer):
        if isinstance(callback, BasePredictionWriter):
            patches.set(callback, "write_on_batch_end", write_nothing)
            patches.set(callback, "write_on_epoch_end", write_nothing)


def gradients_are_stale(module: pl.LightningModule) -> bool:
    """Return whether Lightning will zero the gradients after this `training_step`, and in its usual way.

    It does so between `training_step` and `backward`. The pipeline computes gradients inside `training_step`, so it
    would hold two of each at that time, unless it is known that nobody looks at the old ones before they are zeroed.

    Args:
        module: The user's module, in training.
    """
    trainer = module.trainer
    if trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches or skips_backward(trainer):
        return False
    return (
        module.automatic_optimization
        and not _has("optimizer_zero_grad", module)
        and not _has("on_before_zero_grad", module)
        and not any(_has("on_before_zero_grad", callback, pl.Callback) for callback in _callbacks(trainer))
        and all(map(_zeroes_as_torch, trainer.optimizers))
    )


def _zeroes_as_torch(optimizer: Optimizer) -> bool:
    return type(optimizer).zero_grad is Optimizer.zero_grad and "zero_grad" not in vars(optimizer)


def _callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def _has(hook: str, owner: Any, parent: type | None = None) -> bool:
    """Whether somebody has a hook of their own; Lightning looks through wrappers that are set as attributes."""
    return hook in vars(owner) or bool(is_overridden(hook, owner, parent))
