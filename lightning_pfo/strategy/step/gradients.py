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

from lightning_pfo.strategy.parallel.dtensor import from_local, is_divided_over, local, num_shards, placed_like

Gradients = list[torch.Tensor | None]


def take_gradients(parameters: Sequence[nn.Parameter]) -> Gradients:
    """Detach the gradients from the parameters and return them."""
    gradients: Gradients = [placed_like(parameter.grad, parameter) for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return gradients


def put_gradients(parameters: Sequence[nn.Parameter], gradients: Gradients) -> None:
    """Attach gradients that `take_gradients` returned."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _add_gradients(parameters: Sequence[nn.Parameter], gradients: Gradients, factor: torch.Tensor) -> None:
    present = [local(gradient) for gradient in gradients if gradient is not None]
    if present and (factor.is_cuda or factor != 1):  # looking at it would wait for the GPU, where a pass costs little
        torch._foreach_mul_(present, factor)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            local(parameter.grad).add_(local(gradient))


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


def attach_gradients(
    loss: torch.Tensor,
    parameters: Sequence[nn.Parameter],
    gradients: Gradients,
    loss_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `loss` such that `backward` on it adds `gradients`, times its incoming gradient, to the parameters.

    Args:
        loss: 0-dimensional loss value.
        parameters: Where the gradients belong.
        gradients: One per parameter or None; consumed by the first backward.
        loss_scale: What the loss was multiplied with when the gradients were computed.
    """
    handle = torch.zeros((), device=loss.device, requires_grad=True)

    def install(factor: torch.Tensor) -> None:
        _add_gradients(parameters, gradients, factor if loss_scale is None else factor / loss_scale)

    attached: torch.Tensor = _LossWithGradients.apply(handle, loss, install)  # type: ignore[no-untyped-call]
    return attached


def sum_shared_gradients(
    shared: Sequence[nn.Parameter], group: dist.ProcessGroup | None, hosts: dist.ProcessGroup | None
) -> None:
    """Sum the gradients of parameters that several ranks hold, so that their copies stay equal.

    A parameter that no rank used keeps `grad=None`; on this the hosts agree, without waiting for their devices.

    Args:
        shared: The parameters, the same on every rank.
        group: The pipeline's process group.
        hosts: The same processes for tensors on the CPU; see `step_values.host_group`.
    """
    trainable = [parameter for parameter in shared if parameter.requires_grad]
    if not trainable or dist.get_world_size(group) == 1:
        return
    used = torch.tensor([parameter.grad is not None for parameter in trainable], dtype=torch.int32)
    dist.all_reduce(used, group=hosts)
    by_type: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter, is_used in zip(trainable, used.tolist(), strict=True):
        if is_used:
            by_type.setdefault(parameter.dtype, []).append(parameter)
    for parameters in by_type.values():
        gradients = [placed_like(parameter.grad, parameter) for parameter in parameters]
        own = [local(p.detach()) if g is None else local(g) for p, g in zip(parameters, gradients, strict=True)]
        pieces = [
            torch.zeros_like(part).flatten() if g is None else part.flatten()
            for part, g in zip(own, gradients, strict=True)
        ]
        flat = torch.cat(pieces)
        dist.all_reduce(flat, group=group)
        sums = torch.split(flat, [part.numel() for part in own])  # type: ignore[no-untyped-call]
        for parameter, part, total in zip(parameters, own, sums, strict=True):
            parameter.grad = from_local(total.view_as(part), parameter)


def average_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Replace gradients by their mean over the replicas, one collective for each dtype.

    Gradients of parameters that FSDP2 divides over the replicas are averaged already.
    """
    if group is None:
        return
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None and not is_divided_over(parameter, "data_parallel"):
            by_dtype.setdefault(parameter.grad.dtype, []).append(local(parameter.grad))
    for gradients in by_dtype.values():
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
        pieces = torch.split(flat, [gradient.numel() for gradient in gradients])  # type: ignore[no-untyped-call]
        for gradient, piece in zip(gradients, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))


def clip_by_global_norm(
    parameters: Sequence[nn.Parameter],
    max_norm: float,
    *,
    shared: Sequence[nn.Parameter],
    device: torch.device,
    num_ranks: int,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Clip gradients by their norm over all stages, as on a single device.

    A gradient, or a part of one, that several processes hold counts once: each adds its share.

    Args:
        parameters: Those of the optimizer on this rank; placeholders have no gradient and do not matter.
        max_norm: Largest allowed 2-norm of all gradients together.
        shared: Parameters that every rank of a pipeline holds with equal gradients.
        device: Where the norm is reduced.
        num_ranks: Number of ranks of a pipeline.
        group: All processes: those of the pipeline, of its replicas, and of tensor parallelism. None is the world.

    Returns:
        The norm before clipping, the same on every rank.
    """
    is_shared = {id(parameter) for parameter in shared}
    by_copies: dict[float, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            different = num_shards(parameter.grad) * (1 if id(parameter) in is_shared else num_ranks)
            by_copies.setdefault(dist.get_world_size(group) / different, []).append(local(parameter.grad))
    squared = torch.zeros((), device=device)
    for copies, gradients in by_copies.items():
        squared += torch.nn.utils.get_total_norm(gradients).to(device) ** 2 / copies
    dist.all_reduce(squared, group=group)
    norm = squared.sqrt()
    for gradients in by_copies.values():
        _scale_down(gradients, max_norm, norm)
    return norm


def _scale_down(gradients: list[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
    """As `torch.nn.utils.clip_grads_with_norm_` does, whose lists must not mix plain and divided tensors."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    torch._foreach_mul_(gradients, factor)


def clip_by_value(parameters: Sequence[nn.Parameter], max_value: float) -> None:
    """Limit every element of the gradients to `-max_value` .. `max_value`; each process does its part."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_clamp_min_(gradients, -max_value)
        torch._foreach_clamp_max_(gradients, max_value)
