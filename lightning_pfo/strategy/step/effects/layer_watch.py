"""Noticing layers that keep something in attributes: they run on one rank only, once for each microbatch."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lightning_pfo.strategy.model.reach.places import LEFT_ALONE
from lightning_pfo.strategy.step.batches.notices import warn_once

_LOOKED_AT = 3
"""So many batches; what is set in the first of them only is a cache."""


class LayerWatch:
    """Looks at layers after each of the first batches.

    Args:
        modules: The layers of this rank and what is in them, by name.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = dict(modules)
        self._before: dict[tuple[str, str], Any] = {}
        self._batches = 0

    def look(self) -> None:
        """A batch is done; a warning names an attribute that it has changed."""
        if not self._modules:
            return
        self._batches += 1
        now = {
            (name, key): _print_of(value)
            for name, module in self._modules.items()
            for key, value in vars(module).items()
            if key not in LEFT_ALONE and key != "_buffers"
        }
        changed = [place for place, value in now.items() if self._batches > 1 and self._before.get(place) != value]
        if changed:
            name, key = changed[0]
            warn_once(
                f"A layer changes its attribute self.{name}.{key} in a step. Layers run on the rank of their stage "
                f"only, and once for each microbatch, so that this is another value than on one device. Let the layer "
                f"return what is to be kept, and keep it in the step, in an attribute of the user's module."
            )
        self._before = now
        if changed or self._batches == _LOOKED_AT:
            self._modules, self._before = {}, {}


def _print_of(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, dict, set, deque)):
        return id(value), len(value)
    return id(value) if isinstance(value, torch.Tensor) else None
