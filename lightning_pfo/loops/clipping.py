"""Noticing torch's own `clip_grad_norm_`, to which the gradients of one rank are all that there is."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.parallel.compat import before_clipping
from lightning_pfo.strategy.parallel.patches import Patches


def refuse_clipping(parameters: Callable[[], Iterable[nn.Parameter]], patches: Patches) -> None:
    """Let `torch.nn.utils.clip_grad_norm_` refuse the parameters of a pipeline, until `patches` is closed.

    Args:
        parameters: Method of the pipelined model that gives them; the model is not kept alive.
        patches: Gives torch's function back.
    """
    method = weakref.WeakMethod(parameters)

    def look(given: list[torch.Tensor]) -> None:
        own = method()
        if own is not None and not {id(parameter) for parameter in own()}.isdisjoint(map(id, given)):
            raise ConfigurationError(
                "torch.nn.utils.clip_grad_norm_ sees the gradients of this rank's stages only: each rank would clip by "
                "a norm of its own. Use accelerator.clip_grad_norm_(model.parameters(), max_norm), or "
                "model.clip_grad_norm_(max_norm) in a plain loop: the norm over all stages."
            )

    before_clipping(look, patches)
