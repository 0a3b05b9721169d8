"""Running a model as a pipeline over torch.distributed, and telling listeners about every instruction."""

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
