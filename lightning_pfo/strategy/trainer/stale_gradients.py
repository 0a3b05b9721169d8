"""Whether the gradients of the last step may go before the next one begins.

Lightning zeroes them between `training_step` and `backward`. The pipeline computes gradients inside `training_step`, so
it would hold two of each at that time, unless it is known that nobody looks at the old ones before they are zeroed.
"""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden


def gradients_are_stale(module: pl.LightningModule) -> bool:
    """Return whether Lightning will zero the gradients after this `training_step`, and in its usual way.

    Args:
        module: The user's module, in training.
    """
    trainer = module.trainer
    if trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches:
        return False
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return (
        module.automatic_optimization
        and not is_overridden("optimizer_zero_grad", module)
        and not is_overridden("on_before_zero_grad", module)
        and not any(is_overridden("on_before_zero_grad", callback, pl.Callback) for callback in callbacks)
    )
