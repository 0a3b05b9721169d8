"""Calls of the model outside of steps, as from hooks at the end of an epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_pfo.strategy.engine.engine import PipelineEngine
from lightning_pfo.strategy.model.split import Split
from lightning_pfo.strategy.model.units import Unit
from lightning_pfo.strategy.step.effects.within import within_step
from lightning_pfo.strategy.step.values import ValueExchange


def allow_calls_outside_steps(split: Split, engine: PipelineEngine, meet: Callable[[str], object]) -> None:
    """Let hooks call the model on all ranks together: each unit runs where it is, forward only.

    Args:
        split: How the model is divided.
        engine: The pipeline engine of this rank.
        meet: Called first, so that ranks notice if others do not call it.
    """

    def call(unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # the last stage follows nothing more once it has begun, and recomputed layers are called in backward
        if within_step() or engine.is_running:
            return unit.compute(*args, **kwargs)
        ranks = {engine.placement[stage] for stage in split.owners.get(unit, ())}
        if len(ranks) in (0, engine.num_ranks) or not any(True for _ in unit.module.parameters()):
            return unit.compute(*args, **kwargs)
        meet(f"a call of {unit.name!r} outside of a step")
        source = min(ranks)
        result, error = None, None
        if engine.rank == source:
            try:
                with torch.no_grad():
                    result = unit.compute(*args, **kwargs)
            except Exception as exception:
                error = exception
        return ValueExchange(engine.device, engine.group, engine.host_group(), source).share(result, error)

    for unit in split.units.all:
        unit.outside = call
