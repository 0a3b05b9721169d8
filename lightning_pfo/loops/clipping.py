"""Noticing norms of gradients that do not know of other ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import nn

from lightning_pfo.strategy.model.tracing.gradient_readers import Reader, tell_of_readers
from lightning_pfo.strategy.parallel.patches import Patches
from lightning_pfo.strategy.step.batches.notices import warn_once


def tell_of_norms(parameters: Callable[[], Iterable[nn.Parameter]], patches: Patches) -> None:
    """Name what reads gradients of the parameters of a pipeline.

    Args:
        parameters: Method of the pipelined model that gives them; the model is not kept alive.
        patches: When it is closed, all may be read.
    """
    method = weakref.WeakMethod(parameters)

    def told(placeholder: torch.Tensor, reader: Reader) -> None:
        own = method()
        if own is None or all(parameter is not placeholder for parameter in own()):
            return
        warn_once(reader.told("model.clip_grad_norm_(float('inf'))"))

    tell_of_readers(told, patches)
