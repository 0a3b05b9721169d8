"""What one batch would have changed of a module, from what its microbatches have; the rules stand in `attributes`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from functools import partial
from itertools import takewhile
from typing import Any

import numpy as np
import torch

from lightning_pfo.strategy.model.reach.places import Path, named
from lightning_pfo.strategy.step.batches.merging import merge_outputs
from lightning_pfo.strategy.step.batches.notices import warn_once
from lightning_pfo.strategy.step.batches.rules import CHOSEN, Rules, merged_by
from lightning_pfo.strategy.step.batches.structures import holds_tensors
from lightning_pfo.strategy.step.batches.weights import shares_of

Change = tuple[str, Any]
"""`set` to a value, `appended` some items, `written` into a tensor, or `gone`."""
Changes = dict[Path, Change]
"""What has changed, by where it is."""


class At:
    """Stands for a container or an object that all ranks have had at a place, or for a method of it."""

    __slots__ = ("method", "path")

    def __init__(self, path: Path, method: str = "") -> None:
        self.path = path
        self.method = method

    def __eq__(self, other: object) -> bool:
        return isinstance(other, At) and (other.path, other.method) == (self.path, self.method)

    def __hash__(self) -> int:
        return hash((self.path, self.method))


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
        self._are_some = False

    def only(self, indices: Sequence[int]) -> Merge:
        """The same for what some of the microbatches have changed: their numbers add up, or are of one of them."""
        weights = shares_of([self._weights[index] for index in indices], (1,) * len(indices))
        merge = Merge([self.sizes[index] for index in indices], weights)
        merge._are_some = True
        merge._sums = self._sums
        return merge

    def compares(self, place: str, like: Any) -> bool:
        """Whether numbers at a place count too that were not changed: one is taken, or all are set and added up."""
        if isinstance(like, (str, bytes)):
            return self._rules.of(place, like) in CHOSEN
        number = int(like) if type(like) is bool else like
        grown = self._rules.of(place + GROWN, number, ask=False)
        return grown in CHOSEN or (grown is None and self._rules.of(place + SET, number, ask=False) == "sum")

    def find_sums(self, changes: Sequence[Changes], before_of: Callable[[Path], Any]) -> None:
        """Find the modules and objects whose floating-point numbers grow by the sum: they count samples, no batches.

        What grows by 1 in each microbatch counts batches, unless it is known to be added up: there may be one hit each.
        """
        counts: dict[Path, set[tuple[int, ...]]] = {}
        alike = (1,) * len(self.sizes)
        for path in changes[0] if changes else ():
            values = [each[path][1] for each in changes if path in each]
            before = before_of(path)
            if type(before) is int and all(type(value) is int for value in values):
                growth = tuple(value - before for value in values)
                if growth != alike or self._rules.of(named(path) + GROWN * bool(before), 1) != "sum":
                    counts.setdefault(path[:-1], set()).add(growth)
        if max(self.sizes) > 1:  # else nobody can tell samples from batches
            found = {path for path, each in counts.items() if self.sizes in each and alike not in each}
            self._rules.sums = (self._rules.sums - counts.keys()) | found
        self._sums = self._rules.sums

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
            if not all(type(value) in (int, float) for value in values):
                return self._last(values, place)
            values = list(map(float, values))
            first = values[0]
        if type(before) is type(first):
            if self._all_go_on(values, before):
                return self._gone_on([value[len(before) :] for value in values], before, place)
            queue = self._queue(values, before, place)
            if queue is not None:
                return queue
            counters = self._counters(values, before, place)
            if counters is not None:
                return counters
        if type(first) in (int, float):
            return self._numbers(values, before, place, holder)
        if isinstance(first, (torch.Tensor, np.ndarray)):
            return self._arrays(values, before, place)
        if type(first) is bool:
            rule = self._rules.of(place + GROWN if type(before) is bool else place, int(first), ask=False)
            chosen = merged_by(rule, values) if rule in CHOSEN else None
            return self._last(values, place) if chosen is None else chosen[0]
        if isinstance(first, (str, bytes)):
            return self._last(values, place)
        if isinstance(first, deque):  # made by the step; one that was there is appended to
            return deque(self.appended(list(map(list, values)), place), first.maxlen)
        if isinstance(first, set) and isinstance(before, set):
            return (before & set.intersection(*values)) | (set.union(*values) - before)
        if isinstance(first, (dict, list, tuple)) or is_dataclass(first) or holds_tensors(first):
            return self._outputs(values, place)
        return values[-1]

    def _last(self, values: list[Any], place: str) -> Any:
        """What has no merged form: that of the last microbatch, or of the one that has what one device would."""
        rule = self._rules.of(place, values[0]) if isinstance(values[0], (str, bytes)) else None
        if rule == "begin":
            return values[0]
        if rule == "apart" or (rule != "end" and not _is_one_text(values)):
            warn_once(
                f"What a step leaves in {place.split('[')[0]} cannot be put together from that of microbatches: each "
                f"makes a text, or None, of its own values or sizes, and that of the last one stays. Keep the numbers "
                f"or tensors that it is made of, which are those of the batch, and make it after the step "
                f"(in on_train_batch_end, or your loop)."
            )
        return values[-1]

    def _outputs(self, values: list[Any], place: str) -> Any:
        return merge_outputs(values, self.sizes, self._weights, rules=self._rules, path=place)

    def _all_go_on(self, values: list[Any], before: Any) -> bool:
        if type(before) in (list, tuple) and not before:  # what began with nothing may be anything, but of one item
            return max(self.sizes) > 1 and all(len(value) == 1 for value in values)
        return all(_goes_on(value, before) for value in values)

    def _queue(self, values: list[Any], before: Any, place: str) -> Any:
        """A queue with the latest of all microbatches, as one batch would have left it; None if these are none."""
        kept = self._kept(values, before)
        if kept and not self._counts_on(values, before, place):
            added = [value[keeps:] for value, keeps in zip(values, kept, strict=True)]
            return self._gone_on(added, before, place)[-max(map(len, values)) :]
        if not isinstance(before, (torch.Tensor, np.ndarray)) or not before.ndim:
            return None
        kept = self._kept(list(map(_turned, values)), _turned(before))
        if not kept or self._counts_on(values, before, place):
            return None
        latest = self._outputs([value[: len(value) - keeps] for value, keeps in zip(values, kept, strict=True)], place)
        together: Any = torch.cat if isinstance(before, torch.Tensor) else np.concatenate
        return together([latest, before])[: max(map(len, values))]  # they stand first

    def _counters(self, values: list[Any], before: Any, place: str) -> Any:
        """A list that has a number for each of some things, as for classes, and goes on as a tensor of these would.

        None if it is none, as where there is an item for each sample, or a number has become less.
        """
        was, *now = map(_as_tensor, (before, *values))
        if was is None or any(one is None or one.shape != was.shape or bool((one < was).any()) for one in now):
            return None
        if self._rules.of(place, values[0]) == "items":
            return None
        return _in_form_of(values[0], self._arrays(now, was, place).tolist())

    def _counts_on(self, values: list[Any], before: Any, place: str) -> bool:
        """Whether numbers that look like a queue grow alike with any batch: `[3, 2, 2]` counts on to `[3, 3, 2]`."""
        first = values[0]
        if not isinstance(first, (torch.Tensor, np.ndarray)) or not _is_number(before) or first.shape != before.shape:
            return False
        if _is_float(first) and all(bool((value == first).all()) for value in values):
            return True  # a queue has got something else from each
        return self._rules.of(place + GROWN, torch.as_tensor(first) - _start_of(before)) == "first"

    def _kept(self, values: list[Any], before: Any) -> list[int]:
        """What queues keep; nothing where one is none, as the first microbatch alone tells of most tensors."""
        kept = list(takewhile(bool, map(partial(queue_keeps, before=before), values, self.sizes)))
        return kept if len(kept) == len(values) else []

    def _gone_on(self, added: list[Any], before: Any, place: str) -> Any:
        if isinstance(before, torch.Tensor):
            return torch.cat([before, self._outputs(added, place)])
        if isinstance(before, np.ndarray):
            return np.concatenate([before, self._outputs(added, place)])
        return type(before)([*before, *self.appended(list(map(list, added)), place)])

    def _numbers(self, values: list[Any], before: Any, place: str, holder: Path | None) -> Any:
        start = before if _is_finite(before) else 0
        growth = tuple(value - start for value in values)
        is_count = type(values[0]) is int
        by_rule = self._by_rule(values, growth, start != 0, place, ask=is_count)
        if by_rule is not None:
            return by_rule[0]
        if not is_count:
            how = place + GROWN if start else place
            is_sum = holder in self._sums and self._rules.of(how, growth[0], ask=False) != "mean"
            return start + (sum(growth) if is_sum else self._outputs(list(growth), place))
        if start and min(growth) < 0 and len(set(growth)) > 1:  # no counter, but what each counts for itself
            return sum(values)
        counts_samples = self._are_some or (growth == self.sizes and max(growth) > 1)
        return start + (growth[0] if len(set(growth)) == 1 and not counts_samples else sum(growth))

    def _by_rule(
        self, values: Sequence[Any], growth: Sequence[Any], may_grow: bool, place: str, *, ask: bool
    ) -> tuple[Any] | None:
        """Numbers put together by what is known of them; see `growth_of`."""
        if not may_grow:
            rule = self._rules.of(place, values[0], ask=ask)
            if rule is None or rule in CHOSEN:  # from 0 on it grows as it does later
                later = self._rules.of(place + GROWN, values[0], ask=False)
                rule = later if rule is None or later in CHOSEN else rule
            return merged_by(rule, values)
        rule = self._rules.of(place + GROWN, growth[0], ask=ask)
        if rule in CHOSEN:  # what they have grown by is rounded
            return merged_by(rule, values)
        by_growth = merged_by(rule, growth)
        if by_growth is not None:
            return (values[0] - growth[0] + by_growth[0],)
        rule = self._rules.of(place + SET, values[0], ask=ask)
        return None if rule == "counts" else merged_by(rule, values)  # which may go on from what was there

    def _arrays(self, values: list[Any], before: Any, place: str) -> Any:
        shapes = {tuple(value.shape) for value in values}
        if type(before) is not type(values[0]) or {tuple(before.shape)} != shapes:
            return self._outputs(values, place)
        is_count = values[0].ndim == 0 and not _is_float(values[0])
        # rows of a batch that had as many samples as a microbatch has are no number that goes on
        rows = (place, place + SET) if values[0].ndim else ()
        if of := next((of for of in rows if isinstance(self._rules.of(of, values[0], ask=of != place), int)), None):
            return self._outputs(values, of)
        if not _is_number(before):
            return _switched(values, before) if before.ndim else values[-1]
        start = _start_of(before)
        growth = [torch.as_tensor(value) - start for value in values]
        by_rule = self._by_rule(list(map(torch.as_tensor, values)), growth, True, place, ask=is_count)
        if by_rule is None and not _is_float(values[0]) and any(bool((grown < 0).any()) for grown in growth):
            by_rule = (sum(map(torch.as_tensor, values)),)  # no counters, but what each counts for itself
        if by_rule is None:
            by_rule = (start + self._mean_or_sum(torch.stack(growth), place),)
        after = by_rule[0]
        return after.numpy().astype(before.dtype) if isinstance(before, np.ndarray) else after.to(values[0].dtype)

    def _mean_or_sum(self, growth: torch.Tensor, place: str) -> torch.Tensor:
        if growth.is_floating_point() or growth.is_complex():
            # what only some have written into, as into rows of a table, is theirs
            weights = torch.tensor(self._weights, dtype=torch.float64).to(growth)
            written = torch.tensordot(weights, (growth != 0).to(growth), 1)
            share = torch.where(written == 0, 1, written / weights.sum()) if growth.dim() > 1 else 1
            grown: torch.Tensor = torch.tensordot(weights, growth, 1) / share
            return grown
        # a counter of batches, or of something in them, as what layers compute
        counts_batches = max(self.sizes) > 1 and self._rules.of(place + SET, growth[0], ask=False) != "counts"
        is_counter = counts_batches and bool((growth == 1).all())
        return growth[0] if is_counter else growth.sum(0)

    def appended(self, values: list[list[Any]], place: str) -> list[Any]:
        """What one batch would append where microbatches have appended `values`."""
        lengths, sizes = tuple(map(len, values)), list(self.sizes)
        together = [item for value in values for item in value]
        one_per_sample = list(lengths) == sizes and max(lengths) > 1
        if len(values) < len(self.sizes) or len(set(lengths)) > 1:
            return together
        columns = [list(column) for column in zip(*values, strict=True)]
        rule = self._rules.of(place, values[0])
        is_of_all = rule == "items" or one_per_sample
        if rule != "parts" and (is_of_all or any(_are_items(column, sizes) for column in columns)):
            return together
        return [self.values(column, None, f"{place}[{index}]") for index, column in enumerate(columns)]


GROWN, SET = " as it grows", " as it is set"


def growth_of(place: str, value: Any, before: Any) -> dict[str, Any]:
    """What is compared of a value that was set or written, by its place: it may have grown, or be made anew.

    Of numbers that were 0 before, or of which there were none, nobody can tell.
    """
    is_array = isinstance(value, (torch.Tensor, np.ndarray))
    if type(value) is type(before) is bool:
        found: dict[str, Any] = {GROWN: value - before, SET: int(value)}
    elif isinstance(value, (int, float)) and type(value) is not bool:  # those of a trace are of classes of their own
        found = {GROWN: value - before, SET: value} if _is_finite(before) and before else {"": value}
    elif is_array and type(before) is type(value) and value.shape == before.shape and _is_number(before):
        is_known = isinstance(value, np.ndarray) or not value.is_meta
        found = {GROWN: torch.as_tensor(value) - _start_of(before), SET: value} if is_known else {SET: value}
    else:
        value = list(value) if isinstance(value, deque) else value
        grows = type(before) is type(value) and not (is_array and getattr(value, "is_meta", False))
        found = {"": value[len(before) :] if grows and _goes_on(value, before) else value}
        was, now = _as_tensor(before), _as_tensor(value)
        if was is not None and now is not None and was.shape == now.shape:
            found |= {GROWN: now - was, SET: now}
    return {place + how: of_value for how, of_value in found.items()}


def _is_finite(value: Any) -> bool:
    """Whether something is a number that others may be added to: what is infinite was to be replaced."""
    return type(value) in (int, float) and math.isfinite(value)


def _as_tensor(value: Any) -> torch.Tensor | None:
    """A list or tuple of numbers, or of such lists, as a tensor; None if it is none."""
    if type(value) not in (list, tuple) or not value or not _are_numbers(value):
        return None
    try:
        found = np.array(value)
    except ValueError:  # not as many in each
        return None
    return torch.from_numpy(found) if found.dtype in (np.int64, np.float64) else None


def _are_numbers(value: Any) -> bool:
    return type(value) in (int, float) or (type(value) in (list, tuple) and all(map(_are_numbers, value)))


def _in_form_of(like: Any, value: Any) -> Any:
    """Lists of numbers as lists or tuples of such numbers."""
    if type(like) in (int, float):
        return type(like)(value)
    return type(like)(map(_in_form_of, like, value))


def _switched(values: Sequence[Any], before: Any) -> Any:
    """Truth values of which microbatches have changed some each, as rows of a table."""
    start = torch.as_tensor(before)
    after = start ^ torch.stack([torch.as_tensor(value) ^ start for value in values]).any(0)
    return after.numpy() if isinstance(before, np.ndarray) else after


def _start_of(before: Any) -> torch.Tensor:
    """What a tensor or an array grows from: 0 where it is infinite."""
    start = torch.as_tensor(before)
    return torch.where(torch.isfinite(start), start, 0) if _is_float(start) else start


def _are_items(column: list[Any], sizes: list[int]) -> bool:
    """Whether items at one place of lists are of something else in each: names, or numbers that are no sizes."""
    return isinstance(column[0], (str, int)) and len({*column}) > 1 and column != sizes


def _is_one_text(values: Sequence[Any]) -> bool:
    """Whether texts, or None instead, are the same in all; truth values are compared with those of one device."""
    plain = [value for value in values if value is None or isinstance(value, (str, bytes))]
    return len({*plain}) <= 1 and len(plain) in (0, len(values))


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


def queue_keeps(value: Any, size: int, before: Any) -> int:
    """How many of its earlier items a queue begins with, which has lost its first ones and got further ones.

    Args:
        value: The queue: a list or tuple, or a tensor or array that has got a row for each sample.
        size: How many samples there are.
        before: What it was.

    Returns:
        The number; 0 if it is no queue.
    """
    if type(value) in (list, tuple):
        if not (value and before):
            return 0
        gone = next((index for index, item in enumerate(before) if _is_same(value[0], item)), 0)
        kept = len(before) - gone
        if kept == 1 and type(value[0]) is int:  # it may be any number that was the last: `[len(x), batch_idx]`
            return 0
        return kept if gone and len(value) > kept and all(map(_is_same, value, before[gone:])) else 0
    if not isinstance(value, (torch.Tensor, np.ndarray)) or not value.ndim == before.ndim > 0:
        return 0
    kept = len(value) - size
    if value.shape[1:] != before.shape[1:] or value.dtype != before.dtype or not 0 < kept < len(before):
        return 0
    rows = before[len(before) - kept :]
    is_queue = (value[:kept] == rows).all()
    if value.ndim == 1:  # what has few numbers may have them anyhow
        is_queue = is_queue & (rows != rows[0]).any()
    if len(value) == len(before):
        is_queue = is_queue & (value != before).any()
    return kept if bool(is_queue) else 0


def _turned(array: Any) -> Any:
    return array.flip(0) if isinstance(array, torch.Tensor) else array[::-1]


def _is_same(one: Any, other: Any) -> bool:
    """Whether two items are one, or views of all of one tensor, or tuples of such."""
    if isinstance(one, tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if type(one) is not torch.Tensor or type(other) is not torch.Tensor or one.shape != other.shape:
        return one is other or (isinstance(one, At) and one == other)
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride() and one.dtype == other.dtype
