"""Which process is which: replicas of a pipeline, the ranks within one, and those that share a rank's layers.

The order lists the dimensions from the outermost to the innermost, whose processes are neighbours: `dp_pp` (default)
puts the ranks of a pipeline next to each other, `pp_dp` the replicas of a stage. For 2 x 2::

    global rank        0  1  2  3
    dp_pp   replica    0  0  1  1      pp_dp   replica    0  1  0  1
            stage      0  1  0  1              stage      0  0  1  1

Across nodes one wants `pp_dp` where gradients are larger than activations. The ranks of tensor parallelism, which talk
most, are innermost unless the order says otherwise (`dp_tp_pp`).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.parallel.groups import Groups, Wanted

_DIMENSIONS = {"dp": "data_parallel", "pp": "pipeline_parallel", "tp": "tensor_parallel"}


@dataclass(frozen=True)
class ProcessMesh:
    """This process's place.

    Attributes:
        device_mesh: torch's mesh with dimensions `data_parallel`, `pipeline_parallel` and `tensor_parallel`.
        num_replicas: Number of data-parallel replicas.
        replica: Which of them this process belongs to.
        first_of_replica: The first process of that, by its number among all.
        num_ranks: Number of ranks of a pipeline.
        rank: This process's rank in its pipeline.
        tensor_rank: Which part of its layers this process has under tensor parallelism.
        pipeline_group: The processes of this pipeline; None is the world.
        replica_group: The processes that hold the same layers (and parts); None where there is one replica.
        tensor_group: The processes that share the layers of this rank; None without tensor parallelism.
        groups: Makes these groups and others.
    """

    device_mesh: DeviceMesh
    num_replicas: int
    replica: int
    first_of_replica: int
    num_ranks: int
    rank: int
    tensor_rank: int
    pipeline_group: dist.ProcessGroup | None
    replica_group: dist.ProcessGroup | None
    tensor_group: dist.ProcessGroup | None
    groups: Groups


def mesh_dimensions(order: str) -> tuple[str, ...]:
    """The names of the mesh's dimensions, from the outermost to the innermost.

    Raises:
        ConfigurationError: If `order` does not list them.
    """
    parts = order.split("_")
    if "tp" not in parts:
        parts.append("tp")
    if sorted(parts) != sorted(_DIMENSIONS):
        raise ConfigurationError(
            f"mesh_order lists dp, pp and tp from the outermost to the innermost (tp may be left out and is innermost "
            f"then); got {order!r}. Use 'dp_pp' or 'pp_dp'."
        )
    return tuple(_DIMENSIONS[part] for part in parts)


def check_mesh_sizes(data_parallel_size: int, tensor_parallel_size: int, world_size: int) -> None:
    """Check that the processes can be divided into that many replicas and parts.

    Raises:
        ConfigurationError: If not.
    """
    if not _is_size(tensor_parallel_size) or world_size % tensor_parallel_size:
        raise ConfigurationError(
            f"tensor_parallel_size divides the number of processes ({world_size}) into groups of equal size; got "
            f"{tensor_parallel_size!r}. Use one of {_divisors(world_size)}."
        )
    num_places = world_size // tensor_parallel_size
    if not _is_size(data_parallel_size) or num_places % data_parallel_size:
        per_place = f" / tensor_parallel_size={tensor_parallel_size}" if tensor_parallel_size > 1 else ""
        raise ConfigurationError(
            f"data_parallel_size divides the number of processes ({world_size}){per_place} into replicas of equal "
            f"size; got {data_parallel_size!r}. Use one of {_divisors(num_places)}."
        )


def _is_size(value: Any) -> bool:
    return isinstance(value, Integral) and int(value) >= 1


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def make_mesh(
    device_type: str,
    data_parallel_size: int,
    tensor_parallel_size: int,
    order: str,
    timeout: timedelta | None = None,
) -> ProcessMesh:
    """Arrange all processes; a collective call.

    Args:
        device_type: Of the devices of the processes.
        data_parallel_size: Number of replicas.
        tensor_parallel_size: Number of processes that share the layers of a rank.
        order: Which processes are neighbours.
        timeout: How long processes wait for each other in groups; None is torch's default.
    """
    num_ranks = dist.get_world_size() // (data_parallel_size * tensor_parallel_size)
    sizes = {
        "data_parallel": data_parallel_size,
        "pipeline_parallel": num_ranks,
        "tensor_parallel": tensor_parallel_size,
    }
    names = mesh_dimensions(order)
    places = torch.arange(dist.get_world_size()).view([sizes[name] for name in names])
    groups = Groups(device_type, timeout)
    # not by `init_device_mesh`: that makes its groups anew, with torch's own timeout
    mesh = DeviceMesh.from_group(_along_dimensions(places, groups), device_type, places, mesh_dim_names=names)
    replica = mesh.get_local_rank("data_parallel")
    return ProcessMesh(
        device_mesh=mesh,
        num_replicas=data_parallel_size,
        replica=replica,
        first_of_replica=int(places.select(names.index("data_parallel"), replica).min()),
        num_ranks=num_ranks,
        rank=mesh.get_local_rank("pipeline_parallel"),
        tensor_rank=mesh.get_local_rank("tensor_parallel"),
        pipeline_group=mesh.get_group("pipeline_parallel") if num_ranks < dist.get_world_size() else None,
        replica_group=mesh.get_group("data_parallel") if data_parallel_size > 1 else None,
        tensor_group=mesh.get_group("tensor_parallel") if tensor_parallel_size > 1 else None,
        groups=groups,
    )


def check_shard_size(
    shard_size: int | None, fully_shard: bool, data_parallel_size: int, tensor_parallel_size: int
) -> None:
    """Check that replicas can divide layers in groups of a size.

    Raises:
        ConfigurationError: If not.
    """
    if shard_size is None:
        return
    if not fully_shard:
        raise ConfigurationError(
            f"shard_size says how many replicas divide layers; got shard_size={shard_size} and fully_shard=False. Use "
            "fully_shard=True, or leave shard_size out."
        )
    if shard_size < 2 or data_parallel_size % shard_size:
        sizes = [size for size in _divisors(data_parallel_size) if size > 1]
        way_out = f"Use one of {sizes}" if sizes else "Use more replicas (data_parallel_size)"
        raise ConfigurationError(
            f"shard_size divides the replicas (data_parallel_size={data_parallel_size}) into groups that divide layers "
            f"among them; got {shard_size}. {way_out}, or None for all."
        )
    if tensor_parallel_size > 1 and shard_size < data_parallel_size:
        raise ConfigurationError(
            f"Copies of divided layers (shard_size={shard_size} of data_parallel_size={data_parallel_size}) cannot be "
            f"had with tensor parallelism (tensor_parallel_size={tensor_parallel_size}). Use shard_size=None."
        )


def sharding_mesh(mesh: ProcessMesh, shard_size: int | None) -> DeviceMesh:
    """The replicas of this process's layers, and those among them that divide the layers; a collective call of all.

    Args:
        mesh: The places of processes.
        shard_size: How many replicas divide layers among them, neighbours in the order of the mesh; other groups hold
            copies. None: all of them.

    Returns:
        One dimension, or two where there are copies: over the copies, over the parts.
    """
    whole = mesh.device_mesh["data_parallel"]
    if shard_size is None or shard_size == mesh.num_replicas:
        return whole
    places = whole.mesh.view(-1, shard_size)
    groups = _along_dimensions(places, mesh.groups)
    return DeviceMesh.from_group(groups, whole.device_type, places, mesh_dim_names=("data_parallel", "shards"))


def _along_dimensions(places: torch.Tensor, groups: Groups) -> list[dist.ProcessGroup]:
    """The groups of this process along each dimension of a mesh."""
    assert dist.group.WORLD is not None
    own = (places == dist.get_rank()).nonzero()[0].tolist()
    rows = [tuple(places.movedim(dim, -1)[tuple(own[:dim] + own[dim + 1 :])].tolist()) for dim in range(places.ndim)]
    between = [Wanted(row) for row in rows if 1 < len(row) < places.numel()]
    if between:  # on all processes or none
        groups.together(between)
    return [dist.group.WORLD if len(row) == places.numel() else groups.of(row) for row in rows]
