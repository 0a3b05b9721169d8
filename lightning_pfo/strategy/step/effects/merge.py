"""What one batch would have changed of a module, from what its microbatches have; the rules stand in `attributes`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lightning_pfo.strategy.step.batches.merging import merge_outputs

Path = tuple[Any, ...]
Change = tuple[str, Any]
"""`set` to a value, `appended` some items, `written` into a tensor, or `gone`."""
Changes = dict[Path, Change]
"""What has changed, by where it is."""


class Merge:
    """How changes of microbatches are put together.

    Args:
        sizes: How many samples the microbatches have.
        weights: How much they count.

    Attributes:
        floats_add_up: Whether floating-point numbers grow by the sum.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float]) -> None:
        self.sizes = tuple(sizes)
        self._weights = tuple(weights)
        self.floats_add_up = False

    def growth(self, path: Path, changes: Sequence[Changes], before: Any) -> tuple[int, ...]:
        """By how much an integer of the module has grown in the microbatches; nothing for other values."""
        values = [each[path][1] for each in changes if path in each and len(path) == 1]
        start = 0 if before is None else before
        return tuple(value - start for value in values if type(value) is int and type(start) is int)

    def values(self, values: list[Any], before: Any) -> Any:
        """What one batch would leave where microbatches have left `values`, and `before` was."""
        first = values[0]
        if len(self.sizes) == 1:
            return first
        if any(type(value) is not type(first) for value in values):
            return values[-1]
        if type(before) is type(first) and all(_goes_on(value, before) for value in values):
            return self._gone_on([value[len(before) :] for value in values], before)
        if type(first) is int:
            return self._integers(values, before if type(before) is int else 0)
        if isinstance(first, float):
            start = before if type(before) in (int, float) else 0.0
            growth = [value - start for value in values]
            return start + (sum(growth) if self.floats_add_up else self._outputs(growth))
        if isinstance(first, (torch.Tensor, np.ndarray)):
            return self._arrays(values, before)
        return self._outputs(values) if isinstance(first, (dict, list, tuple)) else values[-1]

    def _outputs(self, values: list[Any]) -> Any:
        return merge_outputs(values, self.sizes, self._weights)

    def _gone_on(self, added: list[Any], before: Any) -> Any:
        if isinstance(before, torch.Tensor):
            return torch.cat([before, self._outputs(added)])
        if isinstance(before, np.ndarray):
            return np.concatenate([before, self._outputs(added)])
        return type(before)([*before, *self.appended(list(map(list, added)))])

    def _integers(self, values: list[int], before: int) -> int:
        growth = tuple(value - before for value in values)
        counts_samples = growth == self.sizes and max(growth) > 1
        return before + (growth[0] if len(set(growth)) == 1 and not counts_samples else sum(growth))

    def _arrays(self, values: list[Any], before: Any) -> Any:
        shapes = {tuple(value.shape) for value in values}
        if type(before) is not type(values[0]) or {tuple(before.shape)} != shapes:
            return self._outputs(values)
        if not _is_number(before):
            return values[-1]
        start = torch.as_tensor(before)
        growth = (torch.as_tensor(value) - start for value in values)  # one at a time: they may be large
        if start.is_floating_point() or start.is_complex():
            grown = sum(each * weight for each, weight in zip(growth, self._weights, strict=True))
        else:  # a counter of batches, or of something in them
            is_counter = max(self.sizes) > 1 and all(bool((torch.as_tensor(v) - start == 1).all()) for v in values)
            grown = next(growth) if is_counter else sum(growth)
        after = start + grown
        return after.numpy() if isinstance(before, np.ndarray) else after.to(values[0].dtype)

    def appended(self, values: list[list[Any]]) -> list[Any]:
        """What one batch would append where microbatches have appended `values`."""
        lengths = tuple(map(len, values))
        together = [item for value in values for item in value]
        one_per_sample = lengths == self.sizes and max(lengths) > 1
        if len(values) < len(self.sizes) or len(set(lengths)) > 1 or one_per_sample:
            return together
        columns = [list(column) for column in zip(*values, strict=True)]
        if any(isinstance(column[0], (str, int)) and len(set(column)) > 1 for column in columns):
            return together
        return [self.values(column, None) for column in columns]


def _is_number(value: Any) -> bool:
    return (value.dtype != torch.bool) if isinstance(value, torch.Tensor) else value.dtype.kind in "iufc"


def _goes_on(value: Any, before: Any) -> bool:
    """Whether a value begins with all that was there, and has more."""
    if type(value) in (list, tuple):
        return len(value) > len(before) > 0 and all(map(_is_same, value, before))
    if not isinstance(value, (torch.Tensor, np.ndarray)) or not value.ndim == before.ndim > 0:
        return False
    is_alike = value.shape[1:] == before.shape[1:] and value.dtype == before.dtype
    if not is_alike or not len(value) > len(before) > 0:
        return False
    return bool((value[: len(before)] == before).all())


def _is_same(one: Any, other: Any) -> bool:
    """Whether two items are one, or views of all of one tensor."""
    if type(one) is not torch.Tensor or type(other) is not torch.Tensor or one.shape != other.shape:
        return one is other
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride() and one.dtype == other.dtype
