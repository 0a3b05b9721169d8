"""What one batch would have changed of a module, from what its microbatches have; the rules stand in `attributes`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch

from lightning_pfo.strategy.model.reach.places import Path
from lightning_pfo.strategy.step.batches.merging import merge_outputs
from lightning_pfo.strategy.step.batches.rules import Rules, merged_by
from lightning_pfo.strategy.step.batches.structures import holds_tensors

Change = tuple[str, Any]
"""`set` to a value, `appended` some items, `written` into a tensor, or `gone`."""
Changes = dict[Path, Change]
"""What has changed, by where it is."""


class Merge:
    """How changes of microbatches are put together.

    Args:
        sizes: How many samples the microbatches have.
        weights: How much they count.
        rules: What is known of values at the same place.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], rules: Rules | None = None) -> None:
        self.sizes = tuple(sizes)
        self._rules = rules or Rules()
        self._weights = tuple(weights)
        self._sums: set[Path] = set()

    def find_sums(self, changes: Sequence[Changes], before_of: Callable[[Path], Any]) -> None:
        """Find the modules and objects whose floating-point numbers grow by the sum: they count samples, no batches."""
        counts: dict[Path, set[tuple[int, ...]]] = {}
        for path in changes[0] if changes else ():
            values = [each[path][1] for each in changes if path in each]
            before = before_of(path)
            start = 0 if before is None else before
            if type(start) is int and all(type(value) is int for value in values):
                counts.setdefault(path[:-1], set()).add(tuple(value - start for value in values))
        alike = (1,) * len(self.sizes)
        self._sums = {path for path, each in counts.items() if self.sizes in each and alike not in each}
        if max(self.sizes) == 1:
            self._sums = set()

    def values(self, values: list[Any], before: Any, place: str, holder: Path | None = None) -> Any:
        """What one batch would leave where microbatches have left `values`, and `before` was.

        Args:
            values: What they have left.
            before: What was there.
            place: Where that is, in words.
            holder: Of attributes, where the module or object is that has them.
        """
        first = values[0]
        if len(self.sizes) == 1:
            return first
        if any(type(value) is not type(first) for value in values):
            return values[-1]
        if type(before) is type(first) and self._all_go_on(values, before):
            return self._gone_on([value[len(before) :] for value in values], before, place)
        if type(first) is int:
            return self._integers(values, before if type(before) is int else 0, place)
        if isinstance(first, float):
            start = before if type(before) in (int, float) else 0.0
            growth = [value - start for value in values]
            return start + (sum(growth) if holder in self._sums else self._outputs(growth, place))
        if isinstance(first, (torch.Tensor, np.ndarray)):
            return self._arrays(values, before, place)
        if isinstance(first, set) and isinstance(before, set):
            return (before & set.intersection(*values)) | (set.union(*values) - before)
        if isinstance(first, (dict, list, tuple)) or is_dataclass(first) or holds_tensors(first):
            return self._outputs(values, place)
        return values[-1]

    def _outputs(self, values: list[Any], place: str) -> Any:
        return merge_outputs(values, self.sizes, self._weights, rules=self._rules, path=place)

    def _all_go_on(self, values: list[Any], before: Any) -> bool:
        if type(before) in (list, tuple) and not before:  # what began with nothing may be anything, but of one item
            return max(self.sizes) > 1 and all(len(value) == 1 for value in values)
        return all(_goes_on(value, before) for value in values)

    def _gone_on(self, added: list[Any], before: Any, place: str) -> Any:
        if isinstance(before, torch.Tensor):
            return torch.cat([before, self._outputs(added, place)])
        if isinstance(before, np.ndarray):
            return np.concatenate([before, self._outputs(added, place)])
        return type(before)([*before, *self.appended(list(map(list, added)), place)])

    def _integers(self, values: list[int], before: int, place: str) -> int:
        growth = tuple(value - before for value in values)
        by_rule = merged_by(self._rules.of(place), growth)
        if by_rule is not None:
            return before + int(by_rule[0])
        counts_samples = growth == self.sizes and max(growth) > 1
        return before + (growth[0] if len(set(growth)) == 1 and not counts_samples else sum(growth))

    def _arrays(self, values: list[Any], before: Any, place: str) -> Any:
        shapes = {tuple(value.shape) for value in values}
        if type(before) is not type(values[0]) or {tuple(before.shape)} != shapes:
            return self._outputs(values, place)
        rule = self._rules.of(place) if values[0].ndim or not _is_float(values[0]) else None
        if isinstance(rule, int):
            return self._outputs(values, place)
        growth = [torch.as_tensor(value) - torch.as_tensor(before) for value in values] if _is_number(before) else []
        if not growth:
            return values[-1]
        stacked = torch.stack(growth)
        if stacked.is_floating_point() or stacked.is_complex():
            weights = torch.tensor(self._weights, dtype=torch.float64).to(stacked)
            grown = torch.tensordot(weights, stacked, 1)
        else:  # a counter of batches, or of something in them
            is_counter = bool((stacked == stacked[0]).all()) if rule == "first" else rule is None
            is_counter = is_counter and (rule == "first" or (max(self.sizes) > 1 and bool((stacked == 1).all())))
            grown = stacked[0] if is_counter else stacked.sum(0)
        after = torch.as_tensor(before) + grown
        return after.numpy() if isinstance(before, np.ndarray) else after.to(values[0].dtype)

    def appended(self, values: list[list[Any]], place: str) -> list[Any]:
        """What one batch would append where microbatches have appended `values`."""
        lengths, sizes = tuple(map(len, values)), list(self.sizes)
        together = [item for value in values for item in value]
        one_per_sample = list(lengths) == sizes and max(lengths) > 1
        if len(values) < len(self.sizes) or len(set(lengths)) > 1:
            return together
        columns = [list(column) for column in zip(*values, strict=True)]
        rule = self._rules.of(place)
        if rule == "parts":
            return [self.values(column, None, f"{place}[{index}]") for index, column in enumerate(columns)]
        if rule == "items" or one_per_sample:
            return together
        if any(isinstance(column[0], (str, int)) and len({*column}) > 1 and column != sizes for column in columns):
            return together
        return [self.values(column, None, place) for column in columns]


def growth_of(value: Any, before: Any) -> Any:
    """What is compared of a value that was set or written: by how much it has grown, or what has come to it."""
    if isinstance(value, torch.Tensor) and value.is_meta:
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value - before if type(before) in (int, float) else value
    if type(before) is not type(value):
        return value
    if isinstance(value, (torch.Tensor, np.ndarray)) and value.shape == before.shape and _is_number(before):
        return value - before
    return value[len(before) :] if _goes_on(value, before) else value


def _is_float(value: Any) -> bool:
    return value.is_floating_point() if isinstance(value, torch.Tensor) else value.dtype.kind == "f"


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
