"""Gradients that several processes hold parts or copies of: summed over stages, averaged over replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_pfo.strategy.parallel.dtensor import from_local, is_divided_over, local, placed_like
from lightning_pfo.strategy.parallel.groups import Shared


def sum_shared_gradients(shared: Sequence[Shared]) -> None:
    """Sum the gradients of parameters that several ranks hold, so that their copies stay equal.

    A parameter that no rank used keeps `grad=None`; on this the hosts agree, without waiting for their devices.
    """
    for each in shared:
        trainable = [parameter for parameter in each.parameters if parameter.requires_grad]
        if trainable:
            used = torch.tensor([parameter.grad is not None for parameter in trainable], dtype=torch.int32)
            dist.all_reduce(used, group=each.hosts)
            _sum_gradients([p for p, is_used in zip(trainable, used.tolist(), strict=True) if is_used], each.group)


def _sum_gradients(trainable: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    by_type: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in trainable:
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


def reduce_in_place(tensor: torch.Tensor, group: dist.ProcessGroup, how: Any) -> torch.Tensor:
    """Reduce a tensor over processes, as Lightning does but without a barrier first: hosts do not wait for devices.

    Args:
        tensor: What is reduced; returned too.
        group: The processes.
        how: `mean`, `sum`, `max` and so on, or an operation of torch.distributed.
    """
    name = how.lower() if isinstance(how, str) else ""
    is_mean = name in ("mean", "avg")  # which gloo has not
    dist.all_reduce(tensor, dist.ReduceOp.SUM if is_mean else getattr(dist.ReduceOp, name.upper(), how), group=group)
    if is_mean:
        tensor.copy_(tensor / dist.get_world_size(group))
    return tensor


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
