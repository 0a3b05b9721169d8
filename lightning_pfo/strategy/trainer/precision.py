"""Lightning's precision plugins on a pipeline: what they clip and check concerns all stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.model.tracing.gradient_readers import Reader, tell_of_readers
from lightning_pfo.strategy.parallel.clipping import Norms, clip_by_value, clip_for_torch
from lightning_pfo.strategy.parallel.loss_scaling import skip_together
from lightning_pfo.strategy.step.batches.notices import warn_once
from lightning_pfo.strategy.step.effects.within import within_step

_SUPPORTED = ("32-true", "64-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed")


def check_precision(plugin: Precision) -> None:
    """Check that a precision plugin is one the pipeline was made for.

    Raises:
        ConfigurationError: If it is not.
    """
    if str(plugin.precision) not in _SUPPORTED:
        raise ConfigurationError(
            f"pfo_pipeline runs with precision {', '.join(map(repr, _SUPPORTED))}; got {plugin.precision!r}, which "
            f"replaces layers in ways that were not tried on stages. Use precision='bf16-mixed'."
        )


def check_unscaled(plugin: Precision) -> None:
    """Check that no loss is scaled where gradients are in the host's memory: overflows are looked for on the device.

    Raises:
        ConfigurationError: If so.
    """
    if scaler_of(plugin) is not None:
        raise ConfigurationError(
            f"shard_offload=True keeps gradients in the host's memory, where precision={str(plugin.precision)!r} does "
            f"not look for overflows. Use precision='bf16-mixed', or leave shard_offload=True out."
        )


def scaler_of(plugin: Precision) -> GradScaler | None:
    """The loss scaler of a plugin, if it has one."""
    return getattr(plugin, "scaler", None)


def adapt_to_pipeline(
    plugin: Precision,
    norms: Norms,
    after_backward: Callable[[], None],
    patches: Patches,
) -> None:
    """Let a plugin, and torch, clip by the norm over all stages; where one rank finds an overflow, all skip the step.

    Norms that others compute are those of a rank; what does so is named.

    Args:
        plugin: The Trainer's plugin.
        norms: Those over all stages.
        after_backward: Called after each backward, before the hooks that follow it.
        patches: Undoes it when it is closed.
    """

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: int | float) -> None:
        norms.clip(list(plugin.main_params(optimizer)), clip_val, called="clip_gradients")

    def clip_grad_by_value(optimizer: Optimizer, clip_val: int | float) -> None:
        clip_by_value(list(plugin.main_params(optimizer)), clip_val)

    ordinary = plugin.backward

    def backward(*args: Any, **kwargs: Any) -> None:
        ordinary(*args, **kwargs)
        after_backward()

    patches.set(plugin, "backward", backward)
    patches.set(plugin, "clip_grad_by_norm", clip_grad_by_norm)
    patches.set(plugin, "clip_grad_by_value", clip_grad_by_value)
    scaler = scaler_of(plugin)
    if scaler is not None:
        skip_together(scaler, patches)
    clip_for_torch(norms, within_step, patches)
    tell_of_readers(_told_of_norm, patches)


def _told_of_norm(placeholder: torch.Tensor, reader: Reader) -> None:
    norm, whole = "trainer.strategy.grad_norm()", "trainer.strategy.whole_parameters(gradients=True)"
    warn_once(reader.told(norm, whole, in_step=within_step()))
