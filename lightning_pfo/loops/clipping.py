"""Noticing norms of gradients that do not know of other ranks, such as torch's own `clip_grad_norm_`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.model.tracing.gradient_readers import Reader, tell_of_readers
from lightning_pfo.strategy.parallel.patches import Patches
from lightning_pfo.strategy.step.batches.notices import warn_once


def refuse_norms(parameters: Callable[[], Iterable[nn.Parameter]], patches: Patches) -> None:
    """Refuse `torch.nn.utils.clip_grad_norm_` of the parameters of a pipeline, and name others that read gradients.

    Args:
        parameters: Method of the pipelined model that gives them; the model is not kept alive.
        patches: When it is closed, all may be read.
    """
    method = weakref.WeakMethod(parameters)

    def told(placeholder: torch.Tensor, reader: Reader) -> None:
        own = method()
        if own is None or all(parameter is not placeholder for parameter in own()):
            return
        if reader.clips:
            raise ConfigurationError(
                "torch.nn.utils.clip_grad_norm_ sees the gradients of this rank's stages only: each rank would clip by "
                "a norm of its own. Use accelerator.clip_grad_norm_(model.parameters(), max_norm), or "
                "model.clip_grad_norm_(max_norm) in a plain loop: the norm over all stages."
            )
        warn_once(reader.told("model.clip_grad_norm_(float('inf'))"))

    tell_of_readers(told, patches)
