"""What is done to the layers a rank holds: recomputed activations, compilation, and weights that are made in them.

Layers are changed in place and keep their names, so optimizers and checkpoints see nothing of it.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Iterable, MutableMapping
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.strategy.model.compat import checkpoint_with
from lightning_pfo.strategy.model.units import Unit
from lightning_pfo.strategy.parallel.compat import forget_compiled, forward_pre_hooks_of
from lightning_pfo.strategy.parallel.holder import Holder
from lightning_pfo.strategy.parallel.patches import Patches


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


def make_weights_within(model: nn.Module, patches: Patches) -> None:
    """Let weights that torch makes of others before a module's forward be made in it, until `patches` is closed.

    `torch.nn.utils.weight_norm`, `spectral_norm` and `prune` do so in a hook, which is called where the module is: on
    every rank. In its forward it is called where a stage computes the module, and there its parameters are.
    """
    for module in model.modules():
        hooks = forward_pre_hooks_of(module)
        own = [(key, hook) for key, hook in hooks.items() if type(hook).__module__.startswith(_MAKERS)]
        if own:
            patches.set(module, "forward", _Making(module, module.forward))
        for key, hook in own:
            hooks[key] = stand_in = _Within(hook)
            patches.callback(_put_back, hooks, key, stand_in)


def hooks_that_make_weights(module: nn.Module) -> list[Callable[..., Any]]:
    """Hooks that are called in a module's forward; see `make_weights_within`."""
    return [hook.hook for hook in forward_pre_hooks_of(module).values() if type(hook) is _Within]


_MAKERS = "torch.nn.utils."
"""Modules whose hooks make a module's weights."""


class _Making:
    """The forward of a module, which makes its weights first."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        update_wrapper(self, forward)
        self._module, self._forward = module, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for hook in forward_pre_hooks_of(self._module).values():
            if type(hook) is _Within:
                hook.hook(self._module, args)
        return self._forward(*args, **kwargs)


class _Within:
    """Is called in place of a hook that is called in the forward; copies of the module have the hook.

    Who looks for the hook finds it here, as `torch.nn.utils.prune.remove` does.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for isinstance
        return type(self.hook)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "hook":
            raise AttributeError(name)
        return getattr(self.hook, name)

    def __call__(self, module: nn.Module, args: Any) -> None:
        pass

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.hook, memo)

    def __reduce__(self) -> Any:
        return copy.copy, (self.hook,)  # as files have it


def _put_back(hooks: MutableMapping[int, Any], key: int, stand_in: _Within) -> None:
    if hooks.get(key) is stand_in:  # its handle may have removed it
        hooks[key] = stand_in.hook
