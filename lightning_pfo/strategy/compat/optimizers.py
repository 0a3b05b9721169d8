"""Steps of optimizers: hooks, scaled gradients, and their limits."""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from types import CellType
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_pfo.strategy.compat.patches import Patches

PRIVATE = {
    "torch.optim.optimizer._global_optimizer_pre_hooks": "Hooks would hear of steps of copies of optimizers.",
    "torch.optim.optimizer._global_optimizer_post_hooks": "Hooks would hear of steps of copies of optimizers.",
    "torch.amp.GradScaler._unscale_grads_": (
        "Ranks would skip fp16 steps each by itself, and their weights drift apart."
    ),
    "torch._amp_foreach_non_finite_check_and_unscale_": "Every gradient would be unscaled and checked on its own.",
    "torch._foreach_mul_": "Every gradient would be scaled by a launch of its own.",
    "torch._foreach_clamp_min_": "Every gradient would be clipped by a launch of its own.",
    "torch._foreach_clamp_max_": "Every gradient would be clipped by a launch of its own.",
}
"""Private names, and what they are needed for."""

Unscale = Callable[[Optimizer, torch.Tensor, torch.Tensor, bool], dict[torch.device, torch.Tensor]]
"""Takes an optimizer, 1 / scale, a flag to set where a gradient overflowed, and whether gradients may be fp16."""


def unscale_with(scaler: GradScaler, unscale: Unscale, patches: Patches) -> None:
    """Let `unscale` do what a scaler does with the gradients of an optimizer; it returns its flag by device."""
    patches.set(scaler, "_unscale_grads_", unscale)


def unscale_in_place(gradients: list[torch.Tensor], inv_scale: torch.Tensor, found_inf: torch.Tensor) -> None:
    """Multiply with `inv_scale`, and set `found_inf` to 1 where a result is not finite."""
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inv_scale)


def scale_in_place(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply all tensors with one factor."""
    for device in {tensor.device for tensor in tensors}:
        torch._foreach_mul_([tensor for tensor in tensors if tensor.device == device], factor.to(device))


def clamp_in_place(tensors: list[torch.Tensor], limit: float) -> None:
    """Limit all elements to `-limit` .. `limit`."""
    torch._foreach_clamp_min_(tensors, -limit)
    torch._foreach_clamp_max_(tensors, limit)


@contextmanager
def emptied(registries: Collection[dict[int, Any]]) -> Iterator[None]:
    """Let hooks hear nothing while the context is open: what holds them is empty."""
    before = [dict(registered) for registered in registries]
    for registered in registries:
        registered.clear()
    try:
        yield
    finally:
        for registered, functions in zip(registries, before, strict=True):
            registered.update(functions)


@contextmanager
def optimizer_hooks_aside() -> Iterator[None]:
    """Let the hooks that are for the steps of all optimizers hear nothing while the context is open.

    One of them may have opened it, while others are still to be called: what holds them does not change.
    """
    with Patches() as patches:
        for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
            patches.set(sys.modules[Optimizer.__module__], name, OrderedDict())
        yield


def cell_of(function: Callable[..., Any]) -> CellType | None:
    """Where a function that torch has decorated has the one that it calls; None: it is none, or otherwise."""
    is_of_torch = getattr(function, "__globals__", {}).get("__name__", "").startswith("torch.")
    inner = getattr(function, "__wrapped__", None) if is_of_torch else None

    def holds_it(cell: CellType) -> bool:
        """Or what somebody has put there around it."""
        held = cell.cell_contents
        return callable(held) and inspect.unwrap(held, stop=lambda each: each is inner) is inner

    return None if inner is None else next(filter(holds_it, function.__closure__ or ()), None)  # type: ignore[attr-defined]


_CLIPS: Any = torch.nn.utils.clip_grad_norm_.__wrapped__  # type: ignore[attr-defined]
_CELL = cell_of(torch.nn.utils.clip_grad_norm_)
"""Where torch's function, which switches autograd off, has the one that clips; None: a torch that does otherwise."""


def clip_norms_with(clip: Callable[..., torch.Tensor] | None) -> None:
    """Let `torch.nn.utils.clip_grad_norm_` do something else, also for those who have imported it by its name.

    Args:
        clip: Called with what torch's own does, and its arguments. None: it does that.
    """
    if _CELL is not None:
        _CELL.cell_contents = _CLIPS if clip is None else partial(clip, _CLIPS)
