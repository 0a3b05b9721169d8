"""Progress bars: the first rank alone shows one, but metrics of an epoch are computed by all ranks together."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar

from lightning_pfo.strategy.compat.patches import Patches

_SHOWING = ("on_train_epoch_end", "on_validation_end")
"""Where bars show metrics of an epoch that may not be computed yet."""


def compute_for_bars(trainer: pl.Trainer, patches: Patches) -> None:
    """Let all ranks compute what a progress bar shows of an epoch when the first rank does, until `patches` is closed.

    Others would come to another metric meanwhile, one that a hook computes, and take its numbers for those.
    """
    for bar in [callback for callback in trainer.callbacks if isinstance(callback, ProgressBar)]:  # type: ignore[attr-defined]
        for name in _SHOWING:
            patches.set(bar, name, _computing(getattr(bar, name)))


def _computing(hook: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(hook)
    def run(trainer: pl.Trainer, pl_module: pl.LightningModule) -> Any:
        _ = trainer.progress_bar_metrics
        return hook(trainer, pl_module)

    return run
