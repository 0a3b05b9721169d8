"""Groups of processes: who is who in one, and groups in which hosts agree without their devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

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
    return _group_of(dist.get_process_group_ranks(group or dist.group.WORLD), "gloo")


_Key = tuple[tuple[int, ...], str | None]
_made: WeakKeyDictionary[dist.ProcessGroup, dict[_Key, dist.ProcessGroup]] = WeakKeyDictionary()
"""Groups of some processes of a world, which end with it."""


def _group_of(ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
    """A group of some processes of the world, made once; a collective call of these.

    Args:
        ranks: Ranks in the world.
        backend: The backend; None is the world's.
    """
    assert dist.group.WORLD is not None
    made = _made.setdefault(dist.group.WORLD, {})
    key = (tuple(ranks), backend)
    if key not in made:
        made[key] = dist.new_group(list(ranks), backend=backend, use_local_synchronization=True)
    return made[key]


def _make_together(wanted: Sequence[_Key], device: torch.device) -> None:
    """Make groups of processes that overlap; a collective call of the world.

    Processes that make several overlapping groups without the others (`use_local_synchronization`) wait for each other
    for ever, even in the same order; seen with gloo in torch 2.13.
    """
    assert dist.group.WORLD is not None
    made = _made.setdefault(dist.group.WORLD, {})
    everyone: list[Sequence[_Key]] = [()] * dist.get_world_size()
    dist.all_gather_object(everyone, wanted, group=host_group(None, device))
    for ranks, backend in sorted({key for keys in everyone for key in keys}, key=str):
        if (ranks, backend) not in made:
            made[ranks, backend] = dist.new_group(list(ranks), backend=backend)


@dataclass(frozen=True)
class Shared:
    """What the same ranks of a pipeline hold, several of them.

    Attributes:
        ranks: The ranks, in the pipeline.
        names: Names of the parameters and buffers in the user's module.
        parameters: The parameters.
        group: The ranks' processes.
        hosts: The same for tensors on the CPU; see `host_group`.
    """

    ranks: tuple[int, ...]
    names: list[str]
    parameters: list[nn.Parameter]
    group: dist.ProcessGroup | None
    hosts: dist.ProcessGroup | None


def share(
    tensors: Mapping[str, torch.Tensor],
    holders: Mapping[str, frozenset[int]],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> list[Shared]:
    """Find what this rank of a pipeline holds together with others; a collective call of the world.

    Each set of ranks gets a process group.

    Args:
        tensors: Parameters and buffers by name, placeholders for those of others.
        holders: The ranks that hold each.
        group: The pipeline's process group.
        device: The device of its collectives.
    """
    own, size = dist.get_rank(group), dist.get_world_size(group)
    sets = sorted({tuple(sorted(ranks)) for ranks in holders.values() if own in ranks and len(ranks) > 1})
    members = {ranks: tuple(global_rank(group, rank) for rank in ranks) for ranks in sets if len(ranks) < size}
    backends = (None,) if device.type == "cpu" else (None, "gloo")
    _make_together([(ranks, backend) for ranks in members.values() for backend in backends], device)
    found = []
    for ranks in sets:
        of_ranks = {name: tensor for name, tensor in tensors.items() if tuple(sorted(holders[name])) == ranks}
        processes = _group_of(members[ranks]) if ranks in members else group
        found.append(
            Shared(
                ranks,
                list(of_ranks),
                [tensor for tensor in of_ranks.values() if isinstance(tensor, nn.Parameter)],
                processes,
                host_group(processes, device),
            )
        )
    return found


def copy_from_first(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Give all processes of a group the values that its first one has; a collective call."""
    for tensor in tensors:
        dist.broadcast(local(tensor.detach()), src=global_rank(group, 0), group=group)
