"""Which process is which: data-parallel replicas of a pipeline, and the ranks within one.

`dp_pp` (default) puts the ranks of a pipeline next to each other, `pp_dp` the replicas of a stage. For 2 x 2::

    global rank        0  1  2  3
    dp_pp   replica    0  0  1  1      pp_dp   replica    0  1  0  1
            stage      0  1  0  1              stage      0  0  1  1

Across nodes one wants `pp_dp` where gradients are larger than activations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_pfo.core.errors import ConfigurationError

ORDERS = {"dp_pp": ("data_parallel", "pipeline_parallel"), "pp_dp": ("pipeline_parallel", "data_parallel")}


@dataclass(frozen=True)
class ProcessMesh:
    """This process's place.

    Attributes:
        device_mesh: torch's mesh with dimensions `data_parallel` and `pipeline_parallel`.
        num_replicas: Number of data-parallel replicas.
        replica: Which of them this process belongs to.
        num_ranks: Number of ranks of a pipeline.
        rank: This process's rank in its pipeline.
        pipeline_group: The processes of this pipeline; None is the world.
        replica_group: The processes that hold the same stages; None where there is one replica.
    """

    device_mesh: DeviceMesh
    num_replicas: int
    replica: int
    num_ranks: int
    rank: int
    pipeline_group: dist.ProcessGroup | None
    replica_group: dist.ProcessGroup | None


def check_data_parallel_size(data_parallel_size: int, world_size: int) -> None:
    """Check that the processes can be divided into that many replicas.

    Raises:
        ConfigurationError: If not.
    """
    if data_parallel_size < 1 or world_size % data_parallel_size:
        fitting = [n for n in range(1, world_size + 1) if world_size % n == 0]
        raise ConfigurationError(
            f"data_parallel_size divides the number of processes ({world_size}) into replicas of equal size; got "
            f"{data_parallel_size}. Use one of {fitting}."
        )


def make_mesh(device_type: str, data_parallel_size: int, order: str) -> ProcessMesh:
    """Arrange all processes; a collective call."""
    sizes = {"data_parallel": data_parallel_size, "pipeline_parallel": dist.get_world_size() // data_parallel_size}
    names = ORDERS[order]
    mesh = init_device_mesh(device_type, tuple(sizes[name] for name in names), mesh_dim_names=names)
    has_replicas = data_parallel_size > 1
    return ProcessMesh(
        device_mesh=mesh,
        num_replicas=data_parallel_size,
        replica=mesh.get_local_rank("data_parallel"),
        num_ranks=sizes["pipeline_parallel"],
        rank=mesh.get_local_rank("pipeline_parallel"),
        pipeline_group=mesh.get_group("pipeline_parallel") if has_replicas else None,
        replica_group=mesh.get_group("data_parallel") if has_replicas else None,
    )


def average_gradients(parameters: list[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Replace gradients by their mean over the replicas, one collective for each dtype."""
    if group is None:
        return
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for gradients in by_dtype.values():
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
        pieces = torch.split(flat, [gradient.numel() for gradient in gradients])  # type: ignore[no-untyped-call]
        for gradient, piece in zip(gradients, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))
