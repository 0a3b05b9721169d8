"""What a function of a traced step is given: ordinary tensors, placeholders and values, and what it changes of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_pfo.strategy.compat.tensors import change_mark, memory_of, version_of
from lightning_pfo.strategy.model.tracing.placeholders import is_placeholder
from lightning_pfo.strategy.model.tracing.tracked import Tracked
from lightning_pfo.strategy.model.tracing.trees import tree_map_only
from lightning_pfo.strategy.parallel.dtensor import alike


def trained_by(units: Iterable[Any], result: Any) -> Any:
    """What a function has computed with units inside, needing gradients if their weights do."""
    if not (torch.is_grad_enabled() and any(p.requires_grad for unit in units for p in unit.module.parameters())):
        return result

    def trained(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor

    return tree_map_only(torch.Tensor, trained, result)


def on_device(leaf: Any, device: torch.device) -> Any:
    """A leaf of arguments with a value: zeros for a placeholder, a parameter for that of one, as other ranks have."""
    if not is_placeholder(leaf):
        return leaf
    zeros = torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
    if isinstance(leaf, nn.Parameter):
        return nn.Parameter(zeros, leaf.requires_grad)
    return zeros.requires_grad_(leaf.requires_grad)


def changed_without_mark(function: Any, args: tuple[Any, ...]) -> set[int]:
    """The ids of what is changed by functions of lists, which count no version while torch's dispatch is looked at."""
    name = getattr(function, "__name__", "")
    return set(map(id, alike(args[0]))) if name.startswith("_foreach") and name.endswith("_") and args else set()


def mark_of(leaf: Any) -> object:
    """Another one after a change of an ordinary tensor, or of a parameter's `data`."""
    if not is_ordinary(leaf):
        return None
    return change_mark(leaf) if isinstance(leaf, nn.Parameter) else version_of(leaf)


def version_behind(value: Tracked) -> int:
    """How often a value has been changed in place, or what it stands for: that of divided parameters, say."""
    return version_of(value if value.held is None else value.held)


def memory_behind(value: Tracked) -> int:
    """The number of the memory that a value lies in; 0 if it stands for something else than a divided tensor."""
    if value.held is None:
        return memory_of(value)
    return memory_of(value.held) if isinstance(value.held, DTensor) else 0


def is_ordinary(leaf: Any) -> bool:
    """Whether something is a tensor that is not tracked."""
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, Tracked)


def any_varies(leaves: list[Any]) -> bool:
    """Whether a tracked tensor among some objects has sizes that depend on values."""
    return any(isinstance(leaf, Tracked) and leaf.varies for leaf in leaves)


def is_value(leaf: Any) -> bool:
    """Whether something is a tracked tensor that the trace knows."""
    return isinstance(leaf, Tracked) and leaf.label >= 0


def values_within(module: nn.Module) -> list[torch.Tensor]:
    """The values that stand in the place of a module's parameters and buffers (`torch.func.functional_call`)."""
    return [tensor for tensor in (*module.parameters(), *module.buffers()) if is_value(tensor)]
