"""Running a model as a pipeline over torch.distributed, and telling listeners about every instruction.

A batch goes through the rooms in this order, and imports point the same way only: `trainer` (Lightning) or
`lightning_pfo.loops`, `build` (one rank put together, what `divide` has divided, now or `earlier`), `step` (a user's
step), `engine` (a schedule on one rank), `model` (what is split), `parallel` (what processes do together). Beside
them: `state` (checkpoints) and `watch` (dead ranks).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_pfo.strategy.trainer.strategy import PfoPipelineStrategy

__all__ = ["PfoPipelineStrategy"]


def __getattr__(name: str) -> Any:
    if name != "PfoPipelineStrategy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_pfo.strategy.trainer import (
        strategy as pipeline_strategy,  # here, so that plain loops do not wait for Lightning
    )

    return pipeline_strategy.PfoPipelineStrategy
