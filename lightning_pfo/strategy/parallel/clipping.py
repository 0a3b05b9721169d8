"""Clipping gradients whose norm no process knows alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from lightning_pfo.strategy.parallel.compat import clamp_in_place, scale_in_place
from lightning_pfo.strategy.parallel.dtensor import local, num_shards
from lightning_pfo.strategy.parallel.groups import Shared


def clip_by_global_norm(
    parameters: Sequence[nn.Parameter],
    max_norm: float,
    *,
    shared: Sequence[Shared],
    device: torch.device,
    num_ranks: int,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Clip gradients by their norm over all stages, as on a single device.

    A gradient, or a part of one, that several processes hold counts once: each adds its share.

    Args:
        parameters: Those of the optimizer on this rank; placeholders have no gradient and do not matter.
        max_norm: Largest allowed 2-norm of all gradients together.
        shared: Parameters that several ranks of a pipeline hold with equal gradients.
        device: Where the norm is reduced.
        num_ranks: Number of ranks of a pipeline.
        group: All processes: those of the pipeline, of its replicas, and of tensor parallelism. None is the world.

    Returns:
        The norm before clipping, the same on every rank.
    """
    by_copies = _by_copies(parameters, shared, num_ranks, group)
    norm = _norm_of(by_copies, device, group)
    for gradients in by_copies.values():
        _scale_down(gradients, max_norm, norm)
    return norm


def global_norm(
    parameters: Sequence[nn.Parameter],
    *,
    shared: Sequence[Shared],
    device: torch.device,
    num_ranks: int,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """The norm that `clip_by_global_norm` clips by, with the same arguments."""
    return _norm_of(_by_copies(parameters, shared, num_ranks, group), device, group)


def _by_copies(
    parameters: Sequence[nn.Parameter],
    shared: Sequence[Shared],
    num_ranks: int,
    group: dist.ProcessGroup | None,
) -> dict[float, list[torch.Tensor]]:
    """Gradients by how many processes hold them."""
    num_holders = {id(parameter): len(each.ranks) for each in shared for parameter in each.parameters}
    by_copies: dict[float, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            different = num_shards(parameter.grad) * num_ranks
            copies = dist.get_world_size(group) * num_holders.get(id(parameter), 1) / different
            by_copies.setdefault(copies, []).append(local(parameter.grad))
    return by_copies


def _norm_of(
    by_copies: Mapping[float, Sequence[torch.Tensor]], device: torch.device, group: dist.ProcessGroup | None
) -> torch.Tensor:
    squared = torch.zeros((), device=device)
    for copies, gradients in by_copies.items():
        squared += torch.nn.utils.get_total_norm(gradients).to(device) ** 2 / copies
    dist.all_reduce(squared, group=group)
    return squared.sqrt()


def _scale_down(gradients: list[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
    """As `torch.nn.utils.clip_grads_with_norm_` does, whose lists must not mix plain and divided tensors."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    scale_in_place(gradients, factor)


def clip_by_value(parameters: Sequence[nn.Parameter], max_value: float) -> None:
    """Limit every element of the gradients to `-max_value` .. `max_value`; each process does its part."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients:
        clamp_in_place(gradients, max_value)
