"""Counts that a step keeps, and logs or sets: `self.log("seen", self.seen)`, `self.all.append(self.hits / self.n)`.

Each microbatch goes on from what the batch has found, so none has the count of the batch. What the attributes come to
has rules of its own; where the number that is logged has always been made of these, it is so for the batch too. What
metric objects say counts likewise (`self.hits.compute() / self.n.compute()`); see `of_batch`.
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
_ROUNDED = 1e-4
"""By so much one device may round otherwise what layers compute."""
_OF_ONE: dict[str, Callable[[float, float], float]] = {
    "itself": lambda count, _: count,
    "itself in percent": lambda count, _: 100 * count,
    "rest of itself": lambda count, _: 1 - count,
    "root": lambda count, _: math.sqrt(count),
    "exponential": lambda count, _: math.exp(count),
    "logarithm": lambda count, _: math.log(count),
}
_OF_TWO: dict[str, Callable[[float, float], float]] = {
    "quotient": lambda count, other: _ratio(count, other),
    "percentage": lambda count, other: 100 * _ratio(count, other),
    "rest": lambda count, other: 1 - _ratio(count, other),
    "perplexity": lambda count, other: math.exp(_ratio(count, other)),
}
_MADE = _OF_ONE | _OF_TWO


class Count(NamedTuple):
    """A number that goes on from batch to batch, or that says something of a batch, but is no attribute.

    Attributes:
        before: Gives what it was at the begin of the batch.
        of_parts: What it was in each microbatch.
        of_batch: Gives what it is for the batch.
    """

    before: Callable[[], Any]
    of_parts: Sequence[Any]
    of_batch: Callable[[], Any]


class _Candidate(NamedTuple):
    """What may be logged, and of which counts it is made."""

    made: str
    counts: tuple[Path, ...]

    def of(self, values: Callable[[Path], float]) -> float:
        """Its value, given those of the counts; not a number where there is none."""
        count, other = values(self.counts[0]), values(self.counts[-1])
        try:
            return _MADE[self.made](count, other)
        except (ValueError, ZeroDivisionError, OverflowError):
            return math.nan


def totals_in(
    changes: Sequence[Changes], of_batch: Changes, value_at: Callable[[Path], Any], said: Mapping[Path, Count]
) -> Totals:
    """The counts among what a step has changed.

    Args:
        changes: What each microbatch has changed.
        of_batch: What the batch has.
        value_at: Gives what was somewhere before.
        said: What metric objects have said.

    Returns:
        What knows them.
    """
    kept = {path: value for path, (_, value) in of_batch.items() if _is_number(value)}
    counts = [*said, *kept]

    @cache
    def before(path: Path) -> float:
        return _number(said[path].before() if path in said else value_at(path))

    @cache
    def in_part(index: int, path: Path) -> float:
        if path in said:
            return _number(said[path].of_parts[index])
        return _number(changes[index][path][1]) if path in changes[index] else before(path)

    @cache
    def in_batch(path: Path) -> float:
        if path in said:
            return _number(said[path].of_batch())
        return _number(of_batch[path][1]) if path in of_batch else before(path)

    @cache
    def adds_up(path: Path) -> bool:
        if path not in kept or is_count(kept[path]):
            return True
        growth = sum(in_part(index, path) - before(path) for index in range(len(changes)))
        return _is_close(before(path) + growth, in_batch(path))

    def total(place: str, logged: Mapping[int, Any], rules: Rules) -> float | None:
        candidates = rules.candidates.get(place)
        if candidates is None:
            others = [path for path in counts if path in said or named(path) != place]
            candidates = frozenset(_candidates(others) if others and len(changes) > 1 else ())
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
            rules.made[place] = {each: each.of(in_batch) for each in left}
        if place not in rules.totals and rules.of(place, 0.0, ask=False) != OF_TOTALS:
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


def choose_totals(rules: Rules, numbers: Mapping[str, torch.Tensor]) -> None:
    """Leave of what a number may be made of, which may come to the same by chance, what gives that of one device.

    Args:
        rules: What is known, of which the latest batch has told.
        numbers: What one device has of that batch, by place.
    """
    for place in rules.made.keys() & numbers.keys():
        number = numbers[place]
        made = rules.made[place].items() if number.numel() == 1 else ()
        if close := {each for each, total in made if math.isclose(total, float(number), rel_tol=_ROUNDED)}:
            rules.candidates[place] &= close


def changed_totals(changes: Sequence[Changes], of_batch: Changes, totals: Totals, rules: Rules) -> Changes:
    """What the batch has appended to lists, with the totals among it, and numbers set that were found to be totals.

    Args:
        changes: What each microbatch has changed.
        of_batch: What the batch has.
        totals: Knows the counts that the step keeps.
        rules: What is known of values at the same place.
    """
    found: Changes = {}
    for path, (kind, value) in of_batch.items():
        of_each = [each[path][1] for each in changes if path in each and each[path][0] == kind]
        if len(of_each) < len(changes):
            continue
        if kind == "appended":
            made = _appended(of_each, value, totals, named(path), rules)
        elif kind == "set" and _is_number(value) and rules.of(named(path), 0.0, ask=False) == OF_TOTALS:
            made = _total(of_each, value, totals, named(path), rules)
        else:
            continue
        if made is not None:
            found[path] = (kind, made)
    return found


def _appended(
    of_each: Sequence[list[Any]], items: list[Any], totals: Totals, place: str, rules: Rules
) -> list[Any] | None:
    """The items with the totals among them; None if there are none."""
    if any(len(each) != len(items) for each in of_each):
        return None
    columns = zip(*of_each, strict=True)
    made = [
        _total(column, item, totals, f"{place}[{index}]", rules)
        for index, (item, column) in enumerate(zip(items, columns, strict=True))
    ]
    if all(total is None for total in made):
        return None
    return [item if total is None else total for item, total in zip(items, made, strict=True)]


def _total(of_each: Sequence[Any], like: Any, totals: Totals, place: str, rules: Rules) -> Any:
    """The total at a place, a number of the kind of another one; None if it is none."""
    total = totals(place, dict(enumerate(of_each)), rules) if all(map(_is_number, of_each)) else None
    return None if total is None else _like(like, total)


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
    yield from (_Candidate(made, (path,)) for path in counts for made in _OF_ONE)
    for pair in permutations(islice(counts, _MOST), 2):
        yield from (_Candidate(made, pair) for made in _OF_TWO)


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
