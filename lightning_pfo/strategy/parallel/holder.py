"""A module around a layer, for those who hook into the calls of a layer or compile it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Holder(nn.Module):
    """Calls a layer's `forward`. It is called where the layer really runs, while the layer itself is called everywhere.

    Args:
        layer: The layer.
        forward: Its `forward`.
    """

    def __init__(self, layer: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = layer
        self.__dict__["_call"] = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer's forward."""
        return self.__dict__["_call"](*args, **kwargs)
