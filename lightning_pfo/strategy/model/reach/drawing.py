"""Initialising layers anew in hooks draws on all ranks what it draws on one that has them.

Where torch's functions draw as they find values, or do nothing for tensors without them, they run on a substitute here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn

from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.model.tracing.placeholders import is_placeholder

_BY_VALUES = ("orthogonal_", "sparse_", "trunc_normal_")


def draw_alike(device: torch.device, patches: Patches) -> None:
    """Let functions of `torch.nn.init` that draw by what they find do so for placeholders too.

    Args:
        device: Where this rank computes.
        patches: Undoes it.
    """
    for name in _BY_VALUES:
        patches.set(nn.init, name, _alike(getattr(nn.init, name), device))


def _alike(ordinary: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    @wraps(ordinary)
    def initialise(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not is_placeholder(tensor):
            return ordinary(tensor, *args, **kwargs)  # type: ignore[no-any-return]
        ordinary(torch.empty(tensor.shape, dtype=tensor.dtype, device=device), *args, **kwargs)
        return tensor

    return initialise
