"""Refusing to train on a loss that is NaN from the first batch on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.engine.engine import PipelineEngine
from lightning_pfo.strategy.parallel.dtensor import local
from lightning_pfo.strategy.step.batches.structures import leaves_of
from lightning_pfo.strategy.step.outcome import loss_in

_log = logging.getLogger(__name__)


def refuse_nan(
    engine: PipelineEngine, owner: nn.Module, batch: Any, loss: torch.Tensor, of_microbatches: Sequence[Any]
) -> None:
    """Refuse to train on a loss that is NaN although data and parameters are finite; a collective call of all.

    Args:
        engine: The pipeline engine of this rank.
        owner: The user's module.
        batch: The first training batch.
        loss: Its loss.
        of_microbatches: On the last rank the losses of microbatches.

    Raises:
        ConfigurationError: On every rank.
    """
    mine: tuple[bool, list[int], list[str], str] = (False, [], [], "")
    if bool(torch.isnan(loss)):
        losses = [loss_in(result) for result in of_microbatches]
        bad = [name for name, parameter in owner.named_parameters() if not _is_finite(parameter.detach())]
        in_batch = [_said(leaf) for _, leaf in leaves_of(batch) if not _is_finite(leaf)]
        which = [index for index, value in enumerate(losses) if len(losses) > 1 and bool(torch.isnan(value))]
        mine = (True, which, bad, in_batch[0] if in_batch else "")
    found = [others for others in engine.all_gather(mine, everywhere=True) if others[0]]
    if not found:
        return
    seen = "The loss of the first training batch is NaN"
    which = next((numbers for _, numbers, _, _ in found if numbers), [])
    if which:
        seen += f" (of microbatches {', '.join(map(str, which))})"
    in_batch_of = next((text for *_, text in found if text), "")
    parameters = sorted({name for _, _, names, _ in found for name in names})
    if not in_batch_of and not parameters:
        raise ConfigurationError(
            f"{seen}, although the batch and all parameters are finite, so training would change all weights to NaN. "
            f"Look at the loss: a mean over no elements (of a microbatch whose labels are all -100, or of which a mask "
            f"that the step makes leaves nothing: use loss_over='batch' with schedule='gpipe', or fewer microbatches), "
            f"log(0), 0 / 0, or an overflow in 16 bits. torch.autograd.set_detect_anomaly(True) names the operation; "
            f"if num_microbatches=1 and schedule='gpipe' give a number, the loss does not suit microbatches."
        )
    if engine.is_speaker:
        why = (
            f"the batch has {in_batch_of}" if in_batch_of else f"parameters are not finite: {', '.join(parameters[:3])}"
        )
        _log.warning("%s: %s.", seen, why)


def _is_finite(value: Any) -> bool:
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        return bool(np.isfinite(value).all())
    if not isinstance(value, torch.Tensor) or value.is_meta or not value.is_floating_point():
        return True
    return bool(torch.isfinite(local(value)).all())


def _said(values: torch.Tensor | np.ndarray) -> str:
    tensor = torch.as_tensor(values)
    number = int((~torch.isfinite(tensor)).sum())
    return f"{number} of {tensor.numel()} values that are NaN or infinite in a tensor of shape {tuple(tensor.shape)}"
