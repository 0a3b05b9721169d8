"""Putting together what a step returned for each microbatch: what one device would return for the whole batch.

The rule, for values at the same place of all results, where nothing better has been learnt (see `rules`):

- Tensors and arrays with a batch dimension are joined along it.
- Lists of items (texts, numbers, dicts, tensors of different sizes) are joined: they have as many items as the
  microbatch has samples, or any number. Lists and tuples of tensors of the microbatch's size are structure, as are
  tuples of numbers or of different kinds (`return accuracy, loss`), columns of the microbatch's size, and lists that
  are equal in all results.
- Dicts are merged by key; keys that only some results have are all there. Sets are united.
- Floating-point numbers, also as 0-dimensional tensors, are averaged with the weights of the microbatches.
- Integers are taken as they are if all are equal (an index, a setting), unless they are the numbers of samples or come
  as tensors or from numpy: those are counts, and added, as are integers that differ.
- Other values are taken as they are if all are equal.

What is left has no merged form: different texts, objects, or tensors of shapes that cannot be joined. It becomes a list
with one entry for each microbatch, and a warning names it: nothing is lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lightning_pfo.strategy.step.batches.notices import warn_once
from lightning_pfo.strategy.step.batches.rules import OF_NUMBERS, ROWS, Rule, Rules, merged_by
from lightning_pfo.strategy.step.batches.structures import (
    PLAIN,
    has_samples,
    join_samples,
    leaves_of,
    num_samples,
    parts_of,
    taken_apart,
)
from lightning_pfo.strategy.step.batches.weights import shares_of

_FLOATS = (float, complex, np.inexact)


class UnmergeableError(ValueError):
    """Values of microbatches have no merged form."""


@dataclass(frozen=True)
class _Merger:
    """How results are merged: `sizes` and `weights` are those of the microbatches that have a value at this place."""

    sizes: tuple[int, ...] | None
    weights: tuple[float, ...]
    batch_dim: int
    said: bool = False
    rules: Rules | None = None

    def rule(self, path: str, like: Any, *, ask: bool = True) -> Rule | None:
        """What has been learnt of a place, for such values."""
        return None if self.rules is None else self.rules.of(path, like, ask=ask)

    def rule_of_rows(self, path: str, first: Any) -> Rule | None:
        """Whether a list has the first or the last of what samples have; None: neither is known."""
        places = ((path, first), *leaves_of(first, path))
        rules = (self.rule(place, like, ask=False) for place, like in places)
        return next((rule for rule in rules if rule in ROWS), None)

    def rows_taken(self, path: str, shapes: Sequence[Sequence[int]]) -> tuple[int, int] | None:
        """See `Rules.rows_taken`."""
        if self.rules is None or self.sizes is None:
            return None
        return self.rules.rows_taken(path, shapes, self.sizes)

    def only(self, indices: Sequence[int]) -> _Merger:
        """The same for some of the microbatches; their weights add up to what those of all do."""
        sizes = None if self.sizes is None else tuple(self.sizes[index] for index in indices)
        total = sum(self.weights)
        weights = shares_of([self.weights[index] for index in indices], (1,) * len(indices))
        return _Merger(sizes, tuple(weight * total for weight in weights), self.batch_dim, self.said, self.rules)


def merge_outputs(
    outputs: Sequence[Any],
    sizes: Sequence[int] | None = None,
    weights: Sequence[float] | None = None,
    *,
    batch_dim: int = 0,
    said: bool = False,
    rules: Rules | None = None,
    path: str = "output",
) -> Any:
    """Merge what a step returned for each microbatch; the module says how.

    Args:
        outputs: What it returned, at least one.
        sizes: How many samples each microbatch has; None is not known, and then lists without tensors are joined.
        weights: What the numbers of each are multiplied with before they are added, see `weights`; None is the share of
            its samples.
        batch_dim: The dimension along which tensors have samples.
        said: Whether these are arguments of calls, as of a logger: integers that are equal are settings then.
        rules: What is known of values at the same place.
        path: Where the values are.

    Raises:
        UnmergeableError: If arguments of calls have no merged form.
    """
    if len(outputs) == 1:
        return outputs[0]
    known = None if sizes is None else tuple(sizes)
    if weights is None:
        weights = shares_of(known or (1,) * len(outputs), (1,) * len(outputs))
    return _merge(list(outputs), _Merger(known, tuple(weights), batch_dim, said, rules), path)


def _merge(values: list[Any], how: _Merger, path: str) -> Any:
    first = values[0]
    there = [index for index, value in enumerate(values) if value is not None]
    if len(there) < 2:
        return values[there[0]] if there else None
    if len(there) < len(values):  # such as predictions above a threshold, of which some microbatches have none
        return _merge([values[index] for index in there], how.only(there), path)
    if any(type(value) is not type(first) for value in values):
        return _merge_of_different_types(values, how, path)
    if has_samples(first):
        return _merge_tensors(values, how, path)
    if type(first) in PLAIN or isinstance(first, np.generic):
        return _merge_numbers(values, how, path)
    if isinstance(first, Mapping):
        return _merge_mappings(values, how, path)
    if isinstance(first, Set):
        return type(first)(item for value in values for item in value)  # type: ignore[call-arg]
    if isinstance(first, (list, tuple)) and not hasattr(first, "_fields"):
        rule = how.rule(path, first)
        taken = how.rows_taken(path, [(len(value),) for value in values])
        if taken is not None and (rows := how.rule_of_rows(path, first)) is not None:
            _, number = taken
            items = [item for value in values for item in value]
            return type(first)(items[:number] if rows == "begin" else items[-number:])  # type: ignore[call-arg]
        if rule in ROWS and how.sizes is not None:
            return first if rule == "begin" else values[-1]
        if _are_items(values, how, path):
            items = [item for value in values for item in value]
            return items if type(first) is list else type(first)(items)  # type: ignore[call-arg]
        if len({len(value) for value in values}) > 1:
            return _as_they_are(values, how, path)
    return _merge_parts(values, how, path)


def _merge_parts(values: list[Any], how: _Merger, path: str) -> Any:
    of_values = [taken_apart(value) for value in values]
    first = of_values[0]
    if first is None or any(parts is None or parts.names != first.names for parts in of_values):
        return _as_they_are(values, how, path)
    columns = zip(*(parts.values for parts in of_values if parts is not None), strict=True)
    return first.rebuild(
        [_merge(list(column), how, path + name) for name, column in zip(first.names, columns, strict=True)]
    )


def _merge_mappings(values: list[Mapping[Any, Any]], how: _Merger, path: str) -> Any:
    if all(list(value) == list(values[0]) for value in values):
        return _merge_parts(values, how, path)
    merged = {}
    for key in dict.fromkeys(key for value in values for key in value):
        having = [index for index, value in enumerate(values) if key in value]
        merged[key] = _merge([values[index][key] for index in having], how.only(having), f"{path}[{key!r}]")
    if type(values[0]) is dict:
        return merged
    try:
        return type(values[0])(merged)  # type: ignore[call-arg]
    except Exception:  # the class takes something else
        return merged


def _are_items(values: list[Any], how: _Merger, path: str) -> bool:
    """Whether lists have one item for each sample, or for each of something that samples have different numbers of."""
    rule = how.rule(path, values[0])
    if rule in ("items", "parts"):
        return rule == "items"
    lengths = tuple(len(value) for value in values)
    items = [item for value in values for item in value]
    sizes = how.sizes or (None,) * len(values)
    if isinstance(values[0], tuple) and items and (all(map(_is_number, items)) or _differ_in_kind(values[0])):
        return False  # such as `return accuracy, loss`
    if not any(map(_has_tensors, items)):
        if lengths == sizes:
            return isinstance(values[0], list) or not _are_columns(values, sizes)
        if len(set(lengths)) > 1:
            return True
        is_setting = all(value == values[0] for value in values) or all(isinstance(i, torch.Tensor) for i in items)
        return not is_setting and not _are_columns(values, sizes)
    if lengths != sizes:
        return len(set(lengths)) > 1 and not _differ_in_kind(items)
    if _differ_in_kind(items):
        return False
    found = [_sizes_in(value, how.batch_dim) for value in values]
    if any(one != {size} for one, size in zip(found, sizes, strict=True)):
        return True
    if isinstance(values[0], tuple) or all(size == 1 for size in sizes):
        return False
    if all(map(has_samples, items)):
        warn_once(
            f"{path} has as many tensors as a microbatch has samples, each of this size: they are taken for tensors of "
            f"all samples, not for one of each."
        )
        return False
    return True


def _are_columns(values: list[Any], sizes: Sequence[int | None]) -> bool:
    """Whether all items that hold anything hold a list that is as long as the microbatch."""
    held = [
        _holds_length(item, size)
        for value, size in zip(values, sizes, strict=True)
        for item in value
        if not _holds_nothing(item)
    ]
    return bool(held) and all(held)


def _holds_nothing(value: Any) -> bool:
    if value is None or type(value) in PLAIN:
        return value is None
    parts = parts_of(value)
    return parts is not None and all(map(_holds_nothing, parts.values))


def _holds_length(value: Any, size: int | None) -> bool:
    if type(value) in PLAIN:
        return False
    if isinstance(value, (list, tuple)) and len(value) == size:
        return True
    parts = parts_of(value)
    return parts is not None and any(_holds_length(part, size) for part in parts.values)


def _is_number(value: Any) -> bool:
    is_scalar = isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim == 0
    return is_scalar or isinstance(value, (int, float, complex, np.generic))


def _differ_in_kind(items: Sequence[Any]) -> bool:
    kinds = {(type(item), getattr(item, "ndim", None), str(getattr(item, "dtype", ""))) for item in items}
    return len({kind for kind in kinds if kind[0] is not type(None)}) > 1


def _has_tensors(value: Any) -> bool:
    return bool(_sizes_in(value, 0))


def _sizes_in(value: Any, batch_dim: int) -> set[int]:
    if type(value) in PLAIN:
        return set()
    if has_samples(value):
        size = num_samples(value, batch_dim)
        return set() if size is None else {size}
    parts = taken_apart(value)
    return set() if parts is None else {size for part in parts.values for size in _sizes_in(part, batch_dim)}


# ---- tensors and numbers ----


def _merge_tensors(values: list[Any], how: _Merger, path: str) -> Any:
    dimensionless = [num_samples(value, how.batch_dim) is None for value in values]
    if all(dimensionless):
        if isinstance(values[0], torch.Tensor):
            return _merge_scalar_tensors(values, how, path)
        return np.asarray(_merge_numbers([value[()] for value in values], how, path))
    rule = how.rule(path, values[0])
    if rule == "apart":
        return _as_they_are(values, how, path, "has samples in several dimensions")
    if rule in ROWS:
        return _rows_taken(values, rule, how, path)
    if rule in OF_NUMBERS and len({value.shape for value in values}) == 1:
        return _merge_fixed(values, str(rule), how)
    try:
        return join_samples(values, rule if isinstance(rule, int) else how.batch_dim)
    except Exception as error:  # shapes that differ in other dimensions, mostly
        return _as_they_are(values, how, path, f"cannot be joined ({error})")


def _rows_taken(values: list[Any], rule: Rule | None, how: _Merger, path: str) -> Any:
    """The first or last rows of all samples."""
    taken = how.rows_taken(path, [tuple(value.shape) for value in values])
    if taken is None:
        return values[0] if rule == "begin" else values[-1]
    dim, number = taken
    joined = join_samples(values, dim)
    rows = slice(number) if rule == "begin" else slice(max(0, joined.shape[dim] - number), None)
    return joined[(slice(None),) * dim + (rows,)]


def _merge_fixed(values: list[Any], rule: str, how: _Merger) -> Any:
    """Tensors or arrays whose shape has nothing to do with the number of samples."""
    by_rule = merged_by(rule, values)
    if by_rule is not None:
        return by_rule[0]
    mean = _weighted_mean(torch.stack([torch.as_tensor(value) for value in values]), how)
    return mean.numpy().astype(values[0].dtype) if isinstance(values[0], np.ndarray) else mean


def _merge_scalar_tensors(values: list[torch.Tensor], how: _Merger, path: str) -> Any:
    stacked = torch.stack(values)
    if stacked.dtype == torch.bool:
        return _as_they_are(values, how, path)
    is_count = not (stacked.is_floating_point() or stacked.is_complex())
    by_rule = merged_by(how.rule(path, values[0], ask=is_count), values)
    if by_rule is not None:
        return by_rule[0]
    if is_count:
        return stacked.sum().to(stacked.dtype)
    return _weighted_mean(stacked, how)


def _weighted_mean(stacked: torch.Tensor, how: _Merger) -> torch.Tensor:
    weights = torch.tensor(how.weights, dtype=torch.float64, device=stacked.device)
    wide = stacked.to(torch.complex128 if stacked.is_complex() else torch.float64)
    shares = weights.reshape(-1, *(1,) * (wide.dim() - 1))
    mean: torch.Tensor = torch.where(shares != 0, wide * shares, 0).sum(0)  # a mean over no labels is NaN
    return mean.to(stacked.dtype)


def _merge_numbers(values: list[Any], how: _Merger, path: str) -> Any:
    first = values[0]
    is_count = isinstance(first, (int, np.integer)) and not isinstance(first, bool)
    asks = is_count and any(values)  # an epoch's number is 0 in all batches of the first one, which tells nothing
    is_number = isinstance(first, (int, np.integer, np.bool_, *_FLOATS))
    rule = how.rule(path, first, ask=asks or isinstance(first, str)) if is_number or isinstance(first, str) else None
    by_rule = merged_by(rule, values)
    if by_rule is not None:
        return by_rule[0]
    if is_count and how.said and all(value == first for value in values):
        return first
    if is_count and how.sizes is not None and tuple(int(value) for value in values) == how.sizes:
        return type(first)(sum(values))
    is_sum = isinstance(first, _FLOATS) and not math.isclose(sum(how.weights), 1)
    if all(value == first for value in values) and not is_sum and not isinstance(first, np.integer):
        return first
    if is_count:
        return type(first)(sum(values))
    if isinstance(first, _FLOATS):
        kept = [(value, weight) for value, weight in zip(values, how.weights, strict=True) if weight]
        return type(first)(sum(value * weight for value, weight in kept))
    return _as_they_are(values, how, path)


# ---- what has no merged form ----


def _merge_of_different_types(values: list[Any], how: _Merger, path: str) -> Any:
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        return _merge_numbers([float(value) for value in values], how, path)
    return _as_they_are(values, how, path)


def _as_they_are(values: list[Any], how: _Merger, path: str, why: str = "has no merged form") -> Any:
    first = values[0]
    try:
        if all(value is first or bool(value == first) for value in values):
            return first
    except Exception:  # a comparison may be anything
        pass
    if how.said:
        raise UnmergeableError(path)
    warn_once(
        f"{path}, a {type(first).__name__} that differs between microbatches, {why}: it is a list with one for each "
        f"microbatch. Return tensors, arrays or lists with an item for each sample."
    )
    return list(values)
