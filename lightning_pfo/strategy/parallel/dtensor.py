"""Tensors that a process has not as a whole: divided over several (torch's DTensor), or of others and without values.

Sums, averages and scaling of gradients are linear, so they are done on each process's part. What is not (the norm) asks
here how a tensor is divided. Tensors without values lie on the meta device: torch leaves some things undone with them,
and has several words for what it cannot do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from lightning_pfo.strategy.compat.tensors import local_tensor

_ASSIGNS = frozenset({torch.Tensor.data.__set__})  # type: ignore[attr-defined]
_IN_PLACE = frozenset(
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
)


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


def writes(function: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function writes into tensors that it is given; by their names, and `data = ...`."""
    try:
        if function in _ASSIGNS or "out" in kwargs:
            return True
    except TypeError:  # unhashable
        pass
    name = getattr(function, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") if not name.endswith("__") else name in _IN_PLACE)


def is_written_from_nowhere(
    function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_missing: Callable[[Any], bool]
) -> bool:
    """Whether a tensor that has values would be changed by one that has none: torch says nothing, and does nothing."""
    target, *others = [alike(argument) for argument in (args or kwargs.values())] or [[]]
    if not writes(function, kwargs):
        return False
    for other in others:
        pairs = zip(target, other if len(other) == len(target) else other[:1] * len(target), strict=False)
        if any(isinstance(t, torch.Tensor) and not is_missing(t) and is_missing(o) for t, o in pairs):
            return True
    return False


def alike(argument: Any) -> list[Any]:
    """The tensors of an argument, which functions of many tensors have in lists."""
    return list(argument) if isinstance(argument, (list, tuple)) else [argument]


def lacks_values(error: Exception) -> bool:
    """Whether torch could not do something since a tensor has no values, in its several words for that."""
    said = str(error).lower()
    return isinstance(error, (RuntimeError, TypeError)) and ("meta" in said or "internal assert" in said)
