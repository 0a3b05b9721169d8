"""Gradients of parameters that several stages hold, and small tensors that replicas reduce."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from lightning_pfo.strategy.parallel.dtensor import from_local, local
from lightning_pfo.strategy.parallel.groups import Shared

Gradients = dict[nn.Parameter, torch.Tensor]
"""Gradients by parameter; those that nothing used have none."""


def gradient_type(parameter: nn.Parameter, *, precise: bool) -> torch.dtype:
    """The type in which gradients of a parameter are added up.

    Args:
        parameter: The parameter.
        precise: Whether those of parameters in 16 bits are added up in 32.
    """
    return torch.float32 if precise and parameter.dtype.itemsize < torch.float32.itemsize else parameter.dtype


def in_type(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A gradient in a type; `to` would take long to find that it has it."""
    return gradient if gradient.dtype is dtype else gradient.to(dtype)


SPARSE = 2
"""The kind of gradients with some rows only, of embeddings that ask for them; some optimizers take no others."""


def kind_of(gradient: torch.Tensor | None) -> int:
    """The kind of a gradient: 0 if there is none, 1 for ordinary ones, or `SPARSE`; the largest of all ranks counts."""
    if gradient is None:
        return 0
    return SPARSE if gradient.layout == torch.sparse_coo else 1


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient with all its elements, in which it can be reduced with others."""
    return gradient.to_dense() if gradient.layout == torch.sparse_coo else gradient


def of_kind(gradient: torch.Tensor, kind: int) -> torch.Tensor:
    """A gradient that was reduced, in its kind."""
    return gradient.to_sparse(1) if kind == SPARSE else gradient


def hand_out(gradients: Gradients) -> None:
    """Add gradients to those that parameters have, in the type of the parameters; none are left.

    One by one, so that in another type too there never is a second copy of all.
    """
    while gradients:
        parameter, gradient = gradients.popitem()
        if parameter.grad is None:
            parameter.grad = in_type(gradient, parameter.dtype)
        else:
            local(parameter.grad).add_(local(gradient))


def sum_shared_gradients(shared: Sequence[Shared], gradients: Gradients, *, precise: bool = False) -> None:
    """Sum the gradients of parameters that several ranks hold, so that their copies stay equal; a collective call.

    A parameter that no rank used has no gradient afterwards either; on this the hosts agree, without waiting for their
    devices.
    """
    for each in shared:
        # also of those that are frozen by now: the step may have trained them for a part of it
        used = torch.tensor([kind_of(gradients.get(parameter)) for parameter in each.parameters], dtype=torch.int32)
        dist.all_reduce(used, dist.ReduceOp.MAX, group=each.hosts)
        by_type: dict[torch.dtype, list[nn.Parameter]] = {}
        kinds = {p: kind for p, kind in zip(each.parameters, used.tolist(), strict=True) if kind}
        for parameter in kinds:
            by_type.setdefault(gradient_type(parameter, precise=precise), []).append(parameter)
        for dtype, parameters in by_type.items():
            _sum_gradients(parameters, dtype, gradients, each.group)
        for parameter, kind in kinds.items():
            gradients[parameter] = of_kind(gradients[parameter], kind)


def _sum_gradients(
    parameters: Sequence[nn.Parameter], dtype: torch.dtype, gradients: Gradients, group: dist.ProcessGroup | None
) -> None:
    own = [local(parameter.detach()) for parameter in parameters]
    pieces = [
        dense(local(gradients[parameter])).flatten()
        if parameter in gradients
        else part.new_zeros(part.numel(), dtype=dtype)
        for parameter, part in zip(parameters, own, strict=True)
    ]
    flat = torch.cat(pieces)
    dist.all_reduce(flat, group=group)
    sums = torch.split(flat, [part.numel() for part in own])  # type: ignore[no-untyped-call]
    for parameter, part, total in zip(parameters, own, sums, strict=True):
        gradients[parameter] = from_local(total.view(part.shape), parameter)


class _How(NamedTuple):
    """With whom and by what a tensor is reduced, and whether its mean is wanted."""

    group: dist.ProcessGroup
    operation: Any
    is_mean: bool


_together: list[tuple[torch.Tensor, _How]] | None = None
"""What is to be reduced at the end of `reduced_together`."""


def reduce_in_place(tensor: torch.Tensor, group: dist.ProcessGroup, how: Any) -> torch.Tensor:
    """Reduce a tensor over processes, as Lightning does but without a barrier first: hosts do not wait for devices.

    Args:
        tensor: What is reduced; returned too.
        group: The processes.
        how: `mean`, `sum`, `max` and so on, or an operation of torch.distributed.
    """
    name = how.lower() if isinstance(how, str) else ""
    is_mean = name in ("mean", "avg")  # which gloo has not
    wanted = _How(group, dist.ReduceOp.SUM if is_mean else getattr(dist.ReduceOp, name.upper(), how), is_mean)
    if _together is None:
        _reduce([tensor], wanted)
    else:
        _together.append((tensor, wanted))
    return tensor


@contextmanager
def reduced_together() -> Iterator[None]:
    """Let `reduce_in_place` wait for the end of the context, where tensors that are alike are reduced as one."""
    global _together
    before, _together = _together, []
    try:
        yield
        waiting = _together
    finally:
        _together = before
    alike: dict[tuple[torch.dtype, torch.device, _How], list[torch.Tensor]] = {}
    for tensor, how in waiting:
        alike.setdefault((tensor.dtype, tensor.device, how), []).append(tensor)
    for (_, _, how), tensors in alike.items():
        _reduce(tensors, how)


def _reduce(tensors: Sequence[torch.Tensor], how: _How) -> None:
    flat = tensors[0] if len(tensors) == 1 else torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, how.operation, group=how.group)
    if how.is_mean:
        flat.copy_(flat / dist.get_world_size(how.group))
    if len(tensors) > 1:
        pieces = torch.split(flat, [tensor.numel() for tensor in tensors])  # type: ignore[no-untyped-call]
        for tensor, piece in zip(tensors, pieces, strict=True):
            tensor.copy_(piece.view_as(tensor))
