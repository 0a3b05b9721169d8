"""Moving gradients between the pipeline, which produces them inside a step, and Lightning, which expects them later.

Lightning's closure runs `training_step`, then `zero_grad`, then `backward`. The pipeline has its gradients already when
`training_step` returns; they are set aside and handed out when Lightning calls backward on the loss. So accumulation,
loss division and the hooks around backward work as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

Gradients = list[torch.Tensor | None]


def take_gradients(parameters: Sequence[nn.Parameter]) -> Gradients:
    """Detach the gradients from the parameters and return them."""
    gradients: Gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return gradients


def put_gradients(parameters: Sequence[nn.Parameter], gradients: Gradients) -> None:
    """Attach gradients that `take_gradients` returned."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _add_gradients(parameters: Sequence[nn.Parameter], gradients: Gradients, factor: torch.Tensor) -> None:
    present = [gradient for gradient in gradients if gradient is not None]
    if present:
        torch._foreach_mul_(present, factor)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


class _LossWithGradients(torch.autograd.Function):
    """Identity on the loss whose backward hands out gradients computed before."""

    @staticmethod
    def forward(ctx: Any, handle: torch.Tensor, loss: torch.Tensor, install: Callable[[torch.Tensor], None]) -> Any:
        ctx.install = install
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[None, None, None]:
        ctx.install(grad_outputs[0])
        return None, None, None


def attach_gradients(loss: torch.Tensor, parameters: Sequence[nn.Parameter], gradients: Gradients) -> torch.Tensor:
    """Return `loss` such that `backward` on it adds `gradients`, times its incoming gradient, to the parameters.

    Args:
        loss: 0-dimensional loss value.
        parameters: Where the gradients belong.
        gradients: One per parameter or None; consumed by the first backward.
    """
    handle = torch.zeros((), device=loss.device, requires_grad=True)

    def install(factor: torch.Tensor) -> None:
        _add_gradients(parameters, gradients, factor)

    attached: torch.Tensor = _LossWithGradients.apply(handle, loss, install)  # type: ignore[no-untyped-call]
    return attached


def sum_shared_gradients(shared: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Sum the gradients of parameters that several ranks hold, so that their copies stay equal.

    One collective: all gradients and a flag each, because a parameter that no rank used keeps `grad=None`.
    """
    trainable = [parameter for parameter in shared if parameter.requires_grad]
    if not trainable or dist.get_world_size(group) == 1:
        return
    by_type: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in trainable:
        by_type.setdefault(parameter.dtype, []).append(parameter)
    for dtype, parameters in by_type.items():
        used = torch.tensor([p.grad is not None for p in parameters], dtype=dtype, device=parameters[0].device)
        pieces = [p.grad.flatten() if p.grad is not None else torch.zeros_like(p).flatten() for p in parameters]
        flat = torch.cat([used, *pieces])
        dist.all_reduce(flat, group=group)
        sums = torch.split(flat[len(parameters) :], [p.numel() for p in parameters])  # type: ignore[no-untyped-call]
        for parameter, is_used, total in zip(parameters, flat[: len(parameters)].tolist(), sums, strict=True):
            parameter.grad = total.view_as(parameter) if is_used else None


def clip_by_global_norm(
    parameters: Sequence[nn.Parameter],
    max_norm: float,
    *,
    shared: Sequence[nn.Parameter],
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Clip gradients by their norm over all stages, as on a single device; shared parameters count once.

    Args:
        parameters: Those of the optimizer on this rank; placeholders have no gradient and do not matter.
        max_norm: Largest allowed 2-norm of all gradients together.
        shared: Parameters that every rank holds with equal gradients; the first rank counts them.
        device: Where the norm is reduced.
        group: The pipeline's process group.

    Returns:
        The norm before clipping, the same on every rank.
    """
    elsewhere = {id(parameter) for parameter in shared} if dist.get_rank(group) != 0 else set()
    mine = [p.grad for p in parameters if p.grad is not None and id(p) not in elsewhere]
    squared = torch.zeros((), device=device)
    if mine:
        squared += torch.nn.utils.get_total_norm(mine).to(device) ** 2
    dist.all_reduce(squared, group=group)
    norm = squared.sqrt()
    torch.nn.utils.clip_grads_with_norm_(list(parameters), max_norm, norm)
    return norm
