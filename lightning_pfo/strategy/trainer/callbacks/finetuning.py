"""Lightning's callbacks that unfreeze parameters during training (`BaseFinetuning`), on a pipeline.

What they add to an optimizer must be the same on every rank, or the ids of a checkpoint would differ. They leave out a
parameter whose values equal those of one the optimizer has; here it is left out if it is the same parameter, because
values of other ranks are not known.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_pfo.strategy.compat.patches import Patches


def add_the_same_everywhere(trainer: pl.Trainer, patches: Patches) -> None:
    """Let finetuning callbacks tell parameters apart by identity until `patches` is closed."""
    if _finetuning(trainer):
        patches.set(BaseFinetuning, "filter_on_optimizer", staticmethod(_filter_by_identity))


def _finetuning(trainer: pl.Trainer) -> list[BaseFinetuning]:
    return [callback for callback in trainer.callbacks if isinstance(callback, BaseFinetuning)]  # type: ignore[attr-defined]


def _filter_by_identity(optimizer: Optimizer, params: Iterable[Any]) -> list[Any]:
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    given = list(params)
    added = [parameter for parameter in given if id(parameter) not in known]
    if len(added) < len(given):
        rank_zero_warn(
            f"{len(given) - len(added)} of the {len(given)} parameters that are unfrozen exist already in a group of "
            f"this optimizer, and are left out of the new one. Did you init your optimizer in `configure_optimizers` "
            f"with frozen parameters? Use {type(optimizer).__name__}(filter(lambda p: p.requires_grad, "
            f"self.parameters()), ...)."
        )
    return added
