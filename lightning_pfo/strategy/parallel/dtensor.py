"""Tensors that are divided over several processes (torch's DTensor), from tensor parallelism or FSDP2.

Sums, averages and scaling of gradients are linear, so they are done on each process's part. What is not (the norm) asks
here how a tensor is divided.
"""

from __future__ import annotations

from typing import cast

import torch
from torch.distributed.tensor import DTensor

from lightning_pfo.strategy.parallel.compat import local_tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part, sharing memory with `tensor`; a plain tensor is its own part."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def num_shards(tensor: torch.Tensor) -> int:
    """How many different parts a tensor is divided into."""
    count = 1
    if isinstance(tensor, DTensor):
        for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
            count *= 1 if placement.is_replicate() else size
    return count


def is_divided_over(tensor: torch.Tensor, dimension: str) -> bool:
    """Whether the processes along a dimension of the mesh, by its name, hold a tensor together."""
    return isinstance(tensor, DTensor) and dimension in (tensor.device_mesh.mesh_dim_names or ())


def placed_like(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Bring a gradient into the form of its parameter: autograd may leave a sum over processes pending."""
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        whole: torch.Tensor = gradient.redistribute(placements=parameter.placements)
        return whole
    return gradient


def from_local(part: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The tensor whose part on this process is `part`, divided as `reference` is."""
    if not isinstance(reference, DTensor):
        return part
    whole = DTensor.from_local(
        part,
        reference.device_mesh,
        reference.placements,
        run_check=False,
        shape=reference.shape,
        stride=reference.stride(),
    )
    return cast(torch.Tensor, whole)
