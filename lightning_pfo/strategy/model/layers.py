"""What is done to the layers a rank holds: recomputed activations and compilation.

Layers are changed in place and keep their names, so optimizers and checkpoints see nothing of it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.schedules.schedule import PipelineSchedule

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
