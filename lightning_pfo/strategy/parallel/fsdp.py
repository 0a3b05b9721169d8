"""Layers whose parameters, gradients and optimizer states are divided over the replicas (FSDP2).

Layers keep their names, so optimizers and checkpoints see nothing of it; FSDP2 hooks into a module around each.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.parallel.compat import OLDEST_FSDP, finish_backward
from lightning_pfo.strategy.parallel.holder import Holder

_SHARDED = "_pfo_sharded"


def shard_over_replicas(
    layers: Iterable[nn.Module], mesh: DeviceMesh, kept_whole: Iterable[nn.Parameter]
) -> dict[nn.Module, Holder]:
    """Divide the parameters of each layer over its replicas with FSDP2; layers stay divided.

    A layer is gathered once for an iteration, not for each microbatch, so what replicas save is the memory of gradients
    and optimizer states, and that of weights between iterations (ZeRO stage 2).

    Args:
        layers: The layers of a rank.
        mesh: The replicas.
        kept_whole: Parameters that are not divided.

    Returns:
        What is to be called in place of the `forward` of a divided layer.

    Raises:
        ConfigurationError: If the installed torch cannot.
    """
    _check_torch(mesh.device_type)
    ignored = set(kept_whole)
    for layer in dict.fromkeys(layers):
        if layer.__dict__.get(_SHARDED) is None and not ignored.issuperset(layer.parameters()):
            holder = Holder(layer, layer.forward)
            fully_shard(holder, mesh=mesh, reshard_after_forward=False, ignored_params=ignored)
            layer.__dict__[_SHARDED] = holder
    return {layer: layer.__dict__[_SHARDED] for layer in layers if _SHARDED in layer.__dict__}


def holders_of(module: nn.Module) -> list[nn.Module]:
    """What FSDP2 hooks into, of all divided layers of a module."""
    return [found for each in module.modules() if (found := each.__dict__.get(_SHARDED)) is not None]


def forget_division(module: nn.Module) -> None:
    """Let a copy of a module, whose parameters are whole, know nothing of FSDP2."""
    for each in module.modules():
        each.__dict__.pop(_SHARDED, None)


def accumulate_only(layers: Iterable[nn.Module]) -> None:
    """Let the backwards that follow add up the gradients of divided layers without exchanging them."""
    for layer in layers:
        if isinstance(layer, FSDPModule):
            _exchange_gradients(layer, False)


def reduce_over_replicas(layers: Iterable[nn.Module]) -> None:
    """Average the added-up gradients of divided layers over the replicas, and let go of gathered parameters.

    FSDP2 does so in the hooks of the last backward. The last backward of a schedule may be one of weights only, which
    runs no hooks, so they are called here, as torch's own pipeline stages do.
    """
    for layer in layers:
        if isinstance(layer, FSDPModule):
            _exchange_gradients(layer, True)
            finish_backward(layer)


def release_gathered(layers: Iterable[nn.Module]) -> None:
    """Let go of gathered parameters, which would be out of date after the next optimizer step."""
    for layer in layers:
        if isinstance(layer, FSDPModule):
            layer.reshard()


def _exchange_gradients(layer: FSDPModule, enabled: bool) -> None:
    layer.set_is_last_backward(enabled)
    layer.set_reshard_after_backward(enabled)
    layer.set_requires_gradient_sync(enabled)


def _check_torch(device_type: str) -> None:
    oldest = OLDEST_FSDP.get(device_type, "2.7")
    if torch.__version__ < oldest:
        raise ConfigurationError(
            f"fully_shard=True takes torch {oldest} or newer where the accelerator is {device_type!r}; got "
            f"{torch.__version__}. Use a newer torch, or fully_shard=False."
        )


def check_not_sharded(model: nn.Module) -> None:
    """Check that the user has not applied FSDP2, whose hooks would run outside the stages.

    Raises:
        ConfigurationError: If so.
    """
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule) and _SHARDED not in module.__dict__:
            raise ConfigurationError(
                f"fully_shard was applied to {name or type(model).__name__!r}, but on a pipeline it is applied to the "
                f"layers of each stage. Leave it out of configure_model and use PfoPipelineStrategy(fully_shard=True)."
            )
