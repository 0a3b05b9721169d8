"""What is done to the layers a rank holds: recomputed activations, and compilation.

Layers are changed in place and keep their names, so optimizers and checkpoints see nothing of it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.strategy.compat.modules import forget_compiled
from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.model.compat import checkpoint_with
from lightning_pfo.strategy.model.units import Unit
from lightning_pfo.strategy.parallel.holder import Holder


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
    if _cuts_backwards(schedule):
        raise ConfigurationError(
            f"schedule={schedule.name!r} computes input gradients and weight gradients one after the other, but the "
            f"backward of a compiled layer cannot be cut in two. Use schedule='1f1b' or 'interleaved_1f1b' with "
            f"compile=True, or leave compile=True out."
        )


_DEAR = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
"""Functions of `torch.ops.aten` that take most of the time of a layer, and little of the memory of its activations."""


def check_recomputable(how: str, schedule: PipelineSchedule) -> None:
    """Check that a schedule can run layers that keep some of their activations.

    Raises:
        ConfigurationError: If it cuts backwards in two, so that a layer is recomputed twice: what it keeps serves once.
    """
    if how == "selective" and _cuts_backwards(schedule):
        raise ConfigurationError(
            f"schedule={schedule.name!r} computes input gradients and weight gradients one after the other, but what "
            f"activation_checkpointing='selective' keeps serves one backward. Use activation_checkpointing='full', or "
            f"schedule='1f1b' or 'interleaved_1f1b'."
        )


def _cuts_backwards(schedule: PipelineSchedule) -> bool:
    return any(inst.type == InstructionType.WEIGHT_GRADIENT for order in schedule.orders for inst in order)


def recompute_activations(model: nn.Module, layers: Iterable[nn.Module], patches: Patches, how: str = "full") -> None:
    """Let each layer keep only its inputs and run its forward again in backward.

    Layers of Hugging Face models do so themselves when they are told to, and their model then makes no cache of keys
    and values, which the second forward would find filled by the first.

    Args:
        model: The module that is split.
        layers: Its layers on this rank.
        patches: Undoes it when it is closed.
        how: `full`, or `selective`: results of products of matrices, convolutions and attention are kept too.
    """
    recompute = partial(checkpoint, use_reentrant=False)
    if how == "selective":
        kept = [getattr(torch.ops.aten, name).default for name in _DEAR if hasattr(torch.ops.aten, name)]
        recompute = partial(recompute, context_fn=partial(create_selective_checkpoint_contexts, kept))
    checkpoint_with(model, recompute, patches)
    for layer in dict.fromkeys(layers):
        if not hasattr(layer, "gradient_checkpointing"):
            patches.set(layer, "forward", partial(recompute, layer.forward))


def compile_layers(layers: Iterable[Unit], patches: Patches) -> None:
    """Compile what each layer computes, until `patches` is closed; equal layers share their code."""
    for layer in layers:
        holder = layer.replacement or Holder(layer.module, layer.module.forward)
        holder.compile()
        layer.replacement = holder
        patches.callback(forget_compiled, holder)
