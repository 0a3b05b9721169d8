"""Groups of processes: who is who in one, and groups in which hosts agree without their devices."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from lightning_pfo.strategy.parallel.dtensor import local


def global_rank(group: dist.ProcessGroup | None, rank: int) -> int:
    """The rank in the world of a group's rank; None is the world itself."""
    return rank if group is None else dist.get_global_rank(group, rank)


def host_group(group: dist.ProcessGroup | None, device: torch.device) -> dist.ProcessGroup | None:
    """The processes of `group` for agreements between hosts that devices have no part in; a collective call.

    Args:
        group: The pipeline's process group.
        device: The device of its collectives.
    """
    if device.type == "cpu":
        return group
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)  # type: ignore[no-any-return]


def copy_from_first(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Give all processes of a group the values that its first one has; a collective call."""
    for tensor in tensors:
        dist.broadcast(local(tensor.detach()), src=global_rank(group, 0), group=group)
