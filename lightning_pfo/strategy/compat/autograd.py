"""Autograd's graph and hooks, and what surrounds functions that are differentiated."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import lru_cache
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch._functorch import apis, eager_transforms

from lightning_pfo.strategy.compat.patches import Patches

PRIVATE = {
    "torch._C._current_graph_task_id": (
        "A collective call in the backward of a user's function would wait for ranks that do not make it. Nothing "
        "public tells whether autograd runs a backward."
    ),
    "torch._C._functions.NllLossBackward0._saved_reduction": (
        "A loss that becomes a sum where it was a mean before would be taken for one of the same kind."
    ),
    "torch._C._functions.NllLossBackward0._saved_weight": "So would one whose classes have weights from then on.",
    "torch._C._functions.NllLossBackward0._saved_target": (
        "A loss that takes other labels of its batch by turns would be weighed by those that the first has taken."
    ),
    "torch._C._functions.NllLossBackward0._saved_ignore_index": (
        "Padding that only later batches have would be noticed some batches later."
    ),
    "torch.Tensor._post_accumulate_grad_hooks": (
        "Hooks on gradients that were added up would run for each microbatch, and not on the gradient of the batch."
    ),
    "torch.Tensor._backward_hooks": "Hooks on gradients of parameters would be given those of microbatches.",
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator": (
        "A group of layers under `checkpoint` that a stage boundary cuts would run in backward from its begin, with "
        "layers that are elsewhere. From torch 2.15 on what is used has this name with `_impl` at its end."
    ),
    "torch._functorch.apis.vmap_impl": "Steps could not use `torch.vmap` between layers.",
    "torch._functorch.eager_transforms.grad_impl": "Steps could not use `torch.func.grad` between layers.",
    "torch._functorch.eager_transforms.grad_and_value_impl": "The same of `torch.func.grad_and_value`.",
    "torch._functorch.eager_transforms._jvp_with_argnums": "The same of `torch.func.jvp`.",
    "torch._functorch.eager_transforms._vjp_with_argnums": "Of `torch.func.vjp` an untrue reason would be given.",
}
"""Private names, and what they are needed for."""


def accumulation_hooks_of(parameter: nn.Parameter) -> dict[int, Callable[[nn.Parameter], None]]:
    """What `register_post_accumulate_grad_hook` has registered; a change of the dict counts."""
    return parameter._post_accumulate_grad_hooks or {}  # type: ignore[attr-defined, no-any-return]


def gradient_hooks_of(parameter: nn.Parameter) -> dict[int, Callable[[torch.Tensor], torch.Tensor | None]]:
    """What `register_hook` has registered; a change of the dict counts."""
    return parameter._backward_hooks or {}  # type: ignore[return-value]


def kind_of_operation(operation: Any) -> str:
    """What an operation of autograd's graph does; of a loss with what it does to its parts, such as adding them up.

    Of one of labels also whether classes have weights.
    """
    saved = _saved_by(operation.__class__)
    kind = f"{operation.name()} {operation._saved_reduction if '_saved_reduction' in saved else ''}"
    is_weighted = _is_of_labels(operation) and operation._saved_weight is not None
    return f"{kind} by class" if is_weighted else kind


def ignored_label_of(operation: Any) -> int | None:
    """Which label has no part in what an operation of autograd's graph does; None of one without labels."""
    if not _is_of_labels(operation):
        return None
    ignored = int(operation._saved_ignore_index)
    return ignored - 2**64 if ignored >= 2**63 else ignored  # torch shows a number below 0 so


def target_of(operation: Any) -> torch.Tensor | None:
    """The labels, or other targets, that a loss in autograd's graph was computed for; None of other operations."""
    return operation._saved_target if "_saved_target" in _saved_by(operation.__class__) else None


def _is_of_labels(operation: Any) -> bool:
    return "_saved_ignore_index" in _saved_by(operation.__class__) and str(operation.name()).startswith("NllLoss")


@lru_cache(maxsize=256)
def _saved_by(kind: Any) -> frozenset[str]:
    """Which of these an operation of a kind has saved; each class has its own, and to ask an object takes long."""
    names = ("_saved_reduction", "_saved_target", "_saved_ignore_index")
    return frozenset(name for name in names if hasattr(kind, name))


def in_backward() -> bool:
    """Whether this thread runs a function of autograd's backward."""
    number: int = torch._C._current_graph_task_id()
    return number != -1


LACKS_GRADIENTS = "does not require grad"
"""In what torch says where something is differentiated that has no gradients."""

Recompute = Callable[..., Generator[None, None, None]]
"""What surrounds the forward of a function under `torch.utils.checkpoint`, without reentrance: up to its `yield`."""


_RECOMPUTES = "_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl"
"""What `checkpoint` calls: up to torch 2.14, and from 2.15 on, where the former is for others only."""


def recompute_with(make: Callable[[Recompute], Recompute], patches: Patches) -> None:
    """Let `torch.utils.checkpoint` do something else around forwards, made from what it does."""
    module, older, newer = torch.utils.checkpoint, *_RECOMPUTES
    name = newer if hasattr(module, newer) else older
    patches.set(module, name, make(getattr(module, name)))


Transform = Callable[..., Any]
_TRANSFORMS = {"vmap": (apis, "vmap_impl"), "grad": (eager_transforms, "grad_impl")}
_TRANSFORMS["grad_and_value"] = (eager_transforms, "grad_and_value_impl")
_TRANSFORMS["jvp"] = (eager_transforms, "_jvp_with_argnums")
_TRANSFORMS["vjp"] = (eager_transforms, "_vjp_with_argnums")


def transform_with(make: Callable[[str, Transform], Transform], patches: Patches) -> None:
    """Let functions of `torch.func` do what `make` returns for their names and what they do.

    Args:
        make: Makes it.
        patches: Undoes it when it is closed.
    """
    for name, (module, attribute) in _TRANSFORMS.items():
        patches.set(module, attribute, make(name, getattr(module, attribute)))
