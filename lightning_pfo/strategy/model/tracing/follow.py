"""Letting runs follow the units of a user's module: their `forward` asks the run that is under way."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.model.tracing.tracked import current_run, plain_in_place
from lightning_pfo.strategy.model.units import Unit
from lightning_pfo.strategy.parallel.patches import Patches


def follow_units(units: Iterable[Unit], patches: Patches) -> None:
    """Patch the `forward` of each unit until `patches` is closed; hooks of the unit see tracked tensors."""
    for unit in units:
        unit.forward = unit.module.forward
        patches.set(unit.module, "forward", _followed(unit, unit.module.forward))


def _followed(unit: Unit, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        run = current_run()
        if run is not None and not unit.followed_into:
            return run.call(unit, args, kwargs)
        if run is not None:
            run.enter(unit)
            return forward(*args, **kwargs)
        if unit.outside is not None and not unit.followed_into:
            return unit.outside(unit, plain_in_place(args), plain_in_place(kwargs))
        if unit.is_elsewhere:
            raise ConfigurationError(
                f"{unit.name!r} can only be called inside a step (training_step, validation_step, test_step or "
                f"predict_step; in a loop of one's own, the model's call): elsewhere this process holds the layers of "
                f"its own stage only. Move the call there."
            )
        return unit.compute(*plain_in_place(args), **plain_in_place(kwargs))

    return call
