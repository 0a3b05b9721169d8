"""Loss scaling for fp16 on a pipeline: every rank has its own `torch.amp.GradScaler`, and all must do the same.

The backward of a stage starts from what the next one sends, so the last stage alone multiplies the loss; and where one
rank finds an overflow, all skip the optimizer step and lower their scale.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.optimizers import unscale_in_place, unscale_with
from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.parallel.dtensor import local


def loss_scale_of(scaler: GradScaler | None, device: torch.device) -> torch.Tensor | None:
    """What the loss is multiplied with before backward, without waiting for the device; None where it is not."""
    return scaler.scale(torch.ones((), device=device)) if scaler is not None else None


def skip_together(scaler: GradScaler, patches: Patches) -> None:
    """Let the scalers of all processes skip a step where one of them finds an overflow, until `patches` is closed.

    torch's `ShardedGradScaler` does not do so for fused optimizers, and neither class takes gradients of which some are
    divided over processes.
    """
    unscale_with(scaler, _unscale_everywhere, patches)


def _unscale_everywhere(
    optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
) -> dict[torch.device, torch.Tensor]:
    """Unscale an optimizer's gradients and agree on overflows; a collective call of all processes."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if parameter.grad is None:
            continue
        if parameter.grad.dtype == torch.float16 and not allow_fp16:
            raise ConfigurationError(
                "Gradients in fp16 cannot be unscaled: they would lose what the scale has preserved. Keep the weights "
                "in float32 under precision='16-mixed'."
            )
        by_dtype.setdefault(parameter.grad.dtype, []).append(local(parameter.grad))
    for gradients in by_dtype.values():
        unscale_in_place(gradients, inv_scale, found_inf)
    dist.all_reduce(found_inf, op=dist.ReduceOp.MAX)
    return {found_inf.device: found_inf}
