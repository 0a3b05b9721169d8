"""Counts that a step keeps, and logs or appends: `self.log("seen", self.seen)`, `self.all.append(self.hits / self.n)`.

Each microbatch goes on from what the batch has found, so none has the count of the batch. What the attributes come to
has rules of its own; where the number that is logged has always been made of these, it is so for the batch too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import islice, permutations
from typing import Any, NamedTuple, TypeAlias

import torch

from lightning_pfo.strategy.model.reach.places import Path, named
from lightning_pfo.strategy.model.tracing.tracked import AbsentValueError
from lightning_pfo.strategy.step.batches.rules import OF_TOTALS, Rules
from lightning_pfo.strategy.step.effects.merge import Changes

Totals: TypeAlias = Callable[[str, Mapping[int, Any], Rules], float | None]
"""Gives for a place what the batch has logged there, of what microbatches have; None where that is made of no count."""

_TRIES = 8
"""So many batches may tell nothing."""
_MOST = 8
"""Of more counts only the first are looked at for pairs of which something is made."""
_MADE: dict[str, Callable[[float, float], float]] = {
    "itself": lambda count, _: count,
    "quotient": lambda count, other: _ratio(count, other),
    "percentage": lambda count, other: 100 * _ratio(count, other),
    "rest": lambda count, other: 1 - _ratio(count, other),
    "perplexity": lambda count, other: math.exp(_ratio(count, other)),
}


class _Candidate(NamedTuple):
    """What may be logged, and of which counts it is made."""

    made: str
    counts: tuple[Path, ...]

    def of(self, values: Callable[[Path], float]) -> float:
        """Its value, given those of the counts; not a number where there is none."""
        count, other = values(self.counts[0]), values(self.counts[-1])
        try:
            return _MADE[self.made](count, other)
        except (ZeroDivisionError, OverflowError):
            return math.nan


def totals_in(changes: Sequence[Changes], of_batch: Changes, value_at: Callable[[Path], Any]) -> Totals:
    """The counts among what a step has changed.

    Args:
        changes: What each microbatch has changed.
        of_batch: What the batch has.
        value_at: Gives what was somewhere before.

    Returns:
        What knows them.
    """
    counts = {path: value for path, (_, value) in of_batch.items() if _is_number(value)}

    @cache
    def before(path: Path) -> float:
        return _number(value_at(path))

    @cache
    def in_part(index: int, path: Path) -> float:
        return _number(changes[index][path][1]) if path in changes[index] else before(path)

    @cache
    def in_batch(path: Path) -> float:
        return _number(of_batch[path][1]) if path in of_batch else before(path)

    @cache
    def adds_up(path: Path) -> bool:
        if path not in counts or is_count(counts[path]):
            return True
        growth = sum(in_part(index, path) - before(path) for index in range(len(changes)))
        return _is_close(before(path) + growth, in_batch(path))

    def total(place: str, logged: Mapping[int, Any], rules: Rules) -> float | None:
        candidates = rules.candidates.get(place)
        if candidates is None:
            candidates = frozenset(_candidates(counts) if counts and len(changes) > 1 else ())
        if not candidates or len(changes) == 1:  # of most, at each batch
            return None
        values = {index: float(value) for index, value in logged.items()}
        left = frozenset(
            each
            for each in candidates
            if all(_is_close(each.of(partial(in_part, index)), value) for index, value in values.items())
        )
        rules.tells_nothing[place] += 1
        may_be_of_none = {*values.values()} in ({0.0}, {1.0})
        is_known = bool(left) or not may_be_of_none or rules.tells_nothing[place] == _TRIES
        if is_known:  # else it may be 0 (or 1, what is left) of all samples, by a count that has not changed yet
            rules.candidates[place] = left
        if rules.of(place, 0.0, ask=False) != OF_TOTALS:
            # of what begins with 0 other rules tell as well, and it may be equal to another number by chance there
            left = frozenset(each for each in left if all(before(path) for path in each.counts))
        # others are means, as those of what they are made of are; two that grow alike make any constant
        found = [
            each
            for each in left
            if all(map(adds_up, each.counts))
            and (place in rules.totals or not all(_is_close(each.of(before), value) for value in values.values()))
        ]
        if found:
            rules.totals.add(place)
        return min(found, key=_likelier).of(in_batch) if found else None

    return total


def appended_totals(changes: Sequence[Changes], of_batch: Changes, totals: Totals, rules: Rules) -> Changes:
    """What the batch has appended to lists, with the totals among it.

    Args:
        changes: What each microbatch has changed.
        of_batch: What the batch has.
        totals: Knows the counts that the step keeps.
        rules: What is known of values at the same place.
    """
    found: Changes = {}
    for path, (kind, items) in of_batch.items():
        of_each = [each[path][1] for each in changes if path in each and each[path][0] == "appended"]
        if kind != "appended" or len(of_each) < len(changes) or any(len(each) != len(items) for each in of_each):
            continue
        columns = zip(*of_each, strict=True)
        made = [
            totals(f"{named(path)}[{index}]", dict(enumerate(column)), rules) if all(map(_is_number, column)) else None
            for index, column in enumerate(columns)
        ]
        if any(total is not None for total in made):
            pairs = zip(items, made, strict=True)
            found[path] = (kind, [item if total is None else _like(item, total) for item, total in pairs])
    return found


def _like(item: Any, total: float) -> Any:
    """A number of the kind of another one."""
    if isinstance(item, torch.Tensor):
        return torch.full_like(item, total)
    return type(item)(round(total) if type(item) is int else total)


def _ratio(count: float, other: float) -> float:
    """One by the other; of nothing 0, as by `count / max(other, 1)`."""
    return count / other if count else 0.0


def _likelier(candidate: _Candidate) -> tuple[int, str]:
    """What comes first."""
    return list(_MADE).index(candidate.made), str(candidate.counts)


def _candidates(counts: Iterable[Path]) -> Iterable[_Candidate]:
    yield from (_Candidate("itself", (path,)) for path in counts)
    for pair in permutations(islice(counts, _MOST), 2):
        yield from (_Candidate(made, pair) for made in _MADE if made != "itself")


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_meta and value.dtype != torch.bool and not value.is_complex()
    return type(value) in (int, float)


def is_count(value: Any) -> bool:
    """Whether a number, or a tensor of numbers, is an integer."""
    return not value.is_floating_point() if isinstance(value, torch.Tensor) else type(value) is int


def _number(value: Any) -> float:
    try:
        return float(value) if _is_number(value) else math.nan
    except (AbsentValueError, OverflowError):
        return math.nan


def _is_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-7)  # as rounded in float32
