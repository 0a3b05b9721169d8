"""What a layer was given, or has returned, in microbatches, as one value of the whole batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

_SAME = 1e-3
"""So much, relative to their size, do values differ by rounding: other shapes are added up in another order ..."""
_SAME_IN_16_BITS = 0.05
"""... and so much in 16 bits; so many integers may be others."""


def as_one(
    parts: Sequence[Any],
    sizes: Sequence[int],
    batch_dim: int,
    *,
    once_above: float = math.inf,
    averages: bool = False,
) -> Any:
    """Put values of microbatches together.

    Args:
        parts: The values.
        sizes: How many samples each microbatch has.
        batch_dim: Where samples lie, if there are several ways to take a tensor.
        once_above: Tensors that are the same in all microbatches, as positions of a sequence, are taken once if they
            have more rows for each sample than that.
        averages: Whether numbers that have no samples are averaged; else they have to be the same.

    Raises:
        ValueError: If that cannot be done.
    """
    first = parts[0]
    if not isinstance(first, torch.Tensor):
        if not are_same(parts):
            raise ValueError("arguments differ between microbatches")
        return first
    dims = [dim for dim in range(first.dim()) if _has_samples(parts, sizes, dim)]
    dim = batch_dim if batch_dim in dims else min(dims, default=None)
    if (dim is None or first.shape[dim] > once_above * sizes[0]) and are_same(parts):
        return first
    if dim is not None:
        return torch.cat(list(parts), dim)
    if averages and first.is_floating_point() and all(part.shape == first.shape for part in parts):
        return sum(part * (size / sum(sizes)) for part, size in zip(parts, sizes, strict=True))
    raise ValueError("a tensor without samples differs between microbatches")


def are_same(parts: Sequence[Any]) -> bool:
    """Whether values of microbatches are the same."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return all(part.shape == first.shape and torch.equal(part, first) for part in parts)
    return all(part is first or part == first for part in parts)


def _has_samples(parts: Sequence[torch.Tensor], sizes: Sequence[int], dim: int) -> bool:
    first = parts[0].shape
    rows = first[dim] // sizes[0]
    if not rows:
        return False
    return all(
        part.shape == (*first[:dim], rows * size, *first[dim + 1 :]) for part, size in zip(parts, sizes, strict=True)
    )


def differs(values: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether tensors have other values, beyond rounding."""
    if len(values) != len(others):
        return True
    return any(
        isinstance(value, torch.Tensor) and (value.shape != other.shape or _error(value, other) > _allowed(value))
        for value, other in zip(values, others, strict=True)
    )


def _allowed(value: torch.Tensor) -> float:
    is_precise = value.is_floating_point() and value.dtype.itemsize > 2
    return _SAME if is_precise else _SAME_IN_16_BITS


def _error(value: torch.Tensor, other: torch.Tensor) -> float:
    if not value.numel():
        return 0.0
    if not (value.is_floating_point() or value.is_complex()):
        return float((value != other).double().mean())
    if value.is_complex():
        value, other = torch.view_as_real(value), torch.view_as_real(other)
    value, other = value.double(), other.double()
    error = float((value - other).norm() / other.norm().clamp_min(1e-30))
    return 0.0 if torch.equal(value.isnan(), other.isnan()) and error != error else error
