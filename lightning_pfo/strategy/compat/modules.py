"""What modules of torch hold, and the hooks on them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys as IncompatibleKeys

from lightning_pfo.strategy.compat.patches import Patches

__all__ = [
    "IncompatibleKeys",
]

PRIVATE = {
    "torch.nn.Module._forward_hooks": (
        "Hooks on parts of a layer would see nothing on other ranks, as where models of transformers collect "
        "attentions; no public name tells of hooks."
    ),
    "torch.nn.Module._backward_hooks": (
        "Hooks on the backward of a layer would meet tensors that are followed, or are of other ranks: torch fails."
    ),
    "torch.nn.Module._backward_pre_hooks": "The same for those that are called before it.",
    "torch.nn.Module._is_full_backward_hook": "Those of the old kind, which torch sets up otherwise, would go too.",
    "torch.nn.Module._forward_pre_hooks": (
        "A module that is put together from parts of tensor parallelism would go on dividing its inputs; what torch "
        "computes weights with before a layer's forward (`weight_norm`) would run on other stages than the layer."
    ),
    "torch.nn.Module._parameters": (
        "Placeholders could not take the places of other ranks' parameters without the side effects of "
        "`__setattr__`, nor be told apart where a parameter has two names."
    ),
    "torch.nn.Module._buffers": "The same for buffers, of which `None` has to stay a buffer.",
    "torch.nn.Module._modules": "`named_children` leaves out a layer that a model calls in two places.",
    "torch.nn.Module._apply": "A module with placeholders could not be moved: `to` fails on the meta device.",
    "torch.nn.Module._compiled_call_impl": "Layers would stay compiled after training; `compile` cannot be undone.",
    "torch.nn.modules.module._IncompatibleKeys": (
        "`load_state_dict` of a pipelined model would return something else than that of a module."
    ),
}
"""Private names, and what they are needed for."""


class Tensors(NamedTuple):
    """What a module itself holds, by name; changing them changes the module."""

    parameters: dict[str, nn.Parameter | None]
    buffers: dict[str, torch.Tensor | None]


def tensors_of(module: nn.Module) -> Tensors:
    """The parameters and buffers that a module itself holds."""
    return Tensors(module._parameters, module._buffers)


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers of a module, each once, under its first name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The modules that a module itself holds, by name; one may have several. Changing it changes the module."""
    return module._modules


def parameters_of(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """What modules themselves hold, each once; much faster than `parameters()`."""
    found: dict[int, nn.Parameter | None] = {}  # tensors themselves take long to hash
    for module in modules:
        if held := module._parameters:
            found.update((id(parameter), parameter) for parameter in held.values())
    return [parameter for parameter in found.values() if parameter is not None]


def modules_of(module: nn.Module) -> list[nn.Module]:
    """A module and all within it, as `modules()` lists them, but in another order and in a third of the time."""
    found = {module: None}
    queue = [module]
    for each in queue:
        for child in each._modules.values():
            if child is not None and child not in found:
                found[child] = None
                queue.append(child)
    return queue


def forward_hooks_of(module: nn.Module) -> Collection[Callable[..., Any]]:
    """What is called after each forward of a module itself."""
    return module._forward_hooks.values()


def forward_pre_hooks_of(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """What is called before each forward of a module itself, by keys of their handles; changes are made there."""
    return module._forward_pre_hooks


class BackwardHooks(NamedTuple):
    """What is called with each backward of a module, by keys of their handles, which remove them here."""

    before: dict[int, Callable[..., Any]]
    after: dict[int, Callable[..., Any]]


def backward_hooks_of(module: nn.Module) -> BackwardHooks:
    """The hooks on the backward of a module itself; none of the old kind, which torch sets up on its output."""
    is_old = module._is_full_backward_hook is False
    return BackwardHooks(module._backward_pre_hooks, {} if is_old else module._backward_hooks)


def take_backward_hooks_of(module: nn.Module, patches: Patches) -> BackwardHooks:
    """The same, and let the module have none until `patches` is closed."""
    hooks = backward_hooks_of(module)
    patches.set(module, "_backward_pre_hooks", OrderedDict())
    if module._is_full_backward_hook is not False:
        patches.set(module, "_backward_hooks", OrderedDict())
    return hooks


def drop_hooks_of_tensor_parallelism(module: nn.Module) -> None:
    """Let a module whose parameters are whole again take and return plain tensors: torch's hooks divide them."""
    for each in module.modules():
        for hooks in (each._forward_pre_hooks, each._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook.__module__.startswith("torch.distributed.tensor")]:
                hooks.pop(key)


def map_tensors(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace all tensors of a module, with their gradients, as `to` does."""
    module._apply(change)  # type: ignore[no-untyped-call]


def is_compiled(module: nn.Module) -> bool:
    """Whether what a module calls is compiled with it, by `module.compile()` or in `torch.compile(module)`."""
    return module._compiled_call_impl is not None or "_orig_mod" in children_of(module)


def forget_compiled(module: nn.Module) -> None:
    """Undo `module.compile()`."""
    module._compiled_call_impl = None


class ModuleWithPlaceholders(nn.Module):
    """A module whose `to`, `cuda`, `bfloat16` leave tensors on the meta device there, in the type that all get."""

    def types_have_changed(self) -> None:
        """Tensors have other types from now on."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        changes = False

        def apply(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal changes
            if not tensor.is_meta:
                found = fn(tensor)
            else:
                dtype = fn(torch.empty(0, dtype=tensor.dtype)).dtype
                found = tensor if dtype == tensor.dtype else tensor.to(dtype)
            changes = changes or found.dtype != tensor.dtype
            return found

        applied = super()._apply(apply, recurse)  # type: ignore[no-untyped-call]
        if changes:
            self.types_have_changed()
        return applied
