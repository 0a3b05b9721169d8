"""What is done to the layers a rank holds: recomputed activations, compilation, division over replicas.

Layers are changed in place and keep their names, so optimizers and checkpoints see nothing of it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.schedules.schedule import PipelineSchedule

_SHARDED = "_pfo_sharded"
_recompute = partial(checkpoint, use_reentrant=False)


def check_compiler(device: torch.device) -> None:
    """Check that torch.compile finds what it needs on this machine.

    Raises:
        ConfigurationError: If there is no C++ compiler, which it needs for the CPU.
    """
    compilers = [os.environ.get("CXX") or "g++", "c++", "clang++"]
    if device.type == "cpu" and not any(shutil.which(name) for name in compilers):
        raise ConfigurationError(
            f"compile=True on a CPU needs a C++ compiler; found none of {', '.join(compilers)}. Install g++, or leave "
            f"compile=True out."
        )


def check_compilable(schedule: PipelineSchedule) -> None:
    """Check that a schedule can run compiled layers.

    Raises:
        ConfigurationError: If it computes weight gradients on their own: a compiled backward cannot be cut in two.
    """
    if any(inst.type == InstructionType.WEIGHT_GRADIENT for order in schedule.orders for inst in order):
        raise ConfigurationError(
            f"schedule={schedule.name!r} computes input gradients and weight gradients one after the other, but the "
            f"backward of a compiled layer cannot be cut in two. Use schedule='1f1b' or 'interleaved_1f1b' with "
            f"compile=True, or leave compile=True out."
        )


def recompute_activations(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Let each layer keep only its inputs and run its forward again in backward; undone by `restore_layers`.

    Layers of Hugging Face models do so themselves when they are told to, and their model then makes no cache of keys
    and values, which the second forward would find filled by the first.
    """
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", None) is False:
            module.__dict__ |= {"gradient_checkpointing": True, "_gradient_checkpointing_func": _recompute}
    for layer in dict.fromkeys(layers):
        if not hasattr(layer, "gradient_checkpointing"):
            layer.__dict__["forward"] = partial(checkpoint, layer.forward, use_reentrant=False)


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Compile each layer in place; equal layers share their code. Undone by `restore_layers`."""
    for layer in layers:
        layer.compile()


def restore_layers(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Undo `recompute_activations` and `compile_layers`."""
    for module in model.modules():
        if module.__dict__.get("_gradient_checkpointing_func") is _recompute:
            module.__dict__["gradient_checkpointing"] = False
            del module.__dict__["_gradient_checkpointing_func"]
    for layer in layers:
        layer._compiled_call_impl = None
        forward = layer.__dict__.get("forward")
        if isinstance(forward, partial) and forward.func is checkpoint:
            del layer.__dict__["forward"]
            if layer.forward != forward.args[0]:  # somebody else had replaced it before
                layer.__dict__["forward"] = forward.args[0]


def shard_over_replicas(layers: Iterable[nn.Module], mesh: DeviceMesh, kept_whole: Iterable[nn.Parameter]) -> None:
    """Divide the parameters of each layer over its replicas with FSDP2; layers stay divided.

    A layer is gathered once for an iteration, not for each microbatch, so what replicas save is the memory of gradients
    and optimizer states, and that of weights between iterations (ZeRO stage 2).

    Args:
        layers: The layers of a rank.
        mesh: The replicas.
        kept_whole: Parameters that are not divided.
    """
    ignored = set(kept_whole)
    for layer in dict.fromkeys(layers):
        if layer.__dict__.get(_SHARDED) is None and not ignored.issuperset(layer.parameters()):
            fully_shard(layer, mesh=mesh, reshard_after_forward=False, ignored_params=ignored)
            layer.__dict__[_SHARDED] = True


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
            state = fully_shard.state(layer)  # type: ignore[attr-defined]
            for group in state._fsdp_param_groups:
                group.post_backward()
            state._root_post_backward_final_callback()


def release_gathered(layers: Iterable[nn.Module]) -> None:
    """Let go of gathered parameters, which would be out of date after the next optimizer step."""
    for layer in layers:
        if isinstance(layer, FSDPModule):
            layer.reshard()


def _exchange_gradients(layer: FSDPModule, enabled: bool) -> None:
    layer.set_is_last_backward(enabled)
    layer.set_reshard_after_backward(enabled)
    layer.set_requires_gradient_sync(enabled)


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
