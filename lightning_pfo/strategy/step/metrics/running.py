"""Running means and variances of samples, as of observations in reinforcement learning (`RunningMeanStd`).

Each microbatch brings its own samples into what the batch has found: no mean of what these come to is that of the
batch. But beside a count of samples each tells what its samples add to their sum, and to that of their squares, which
add up. Where a number is found to be such a one by comparing it with one device, it is put together so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_pfo.strategy.model.reach.places import Path, named
from lightning_pfo.strategy.step.batches.rules import Rules
from lightning_pfo.strategy.step.effects.merge import Changes

_ROUNDED = 1e-3
"""By so much a sample a count may be rounded: they begin with a little, to divide by."""


class _Kind(NamedTuple):
    """How a number stands for a sum over samples, given their mean and how many they are.

    Attributes:
        total: The sum, of the number.
        back: The number, of the sum.
        is_larger: Whether what a batch brings is its variance as `torch.var` has it, larger by `n / (n - 1)`.
    """

    total: Callable[[Any, Any, float], Any]
    back: Callable[[Any, Any, float], Any]
    is_larger: bool = False


_VARIANCE = _Kind(lambda x, mean, n: (x + mean**2) * n, lambda s, mean, n: s / n - mean**2)
_KINDS = {
    "running mean": _Kind(lambda x, _, n: x * n, lambda s, _, n: s / n),
    "running variance": _VARIANCE,
    "running variance by torch.var": _Kind(_VARIANCE.total, _VARIANCE.back, is_larger=True),
    "running variance of n - 1": _Kind(
        lambda x, mean, n: x * max(n - 1, 0) + mean**2 * n, lambda s, mean, n: (s - mean**2 * n) / (n - 1)
    ),
    "running squares": _Kind(lambda x, mean, n: x + mean**2 * n, lambda s, mean, n: s - mean**2 * n),
    "running deviation": _Kind(
        lambda x, mean, n: (x**2 + mean**2) * n, lambda s, mean, n: (s / n - mean**2).clamp(min=0).sqrt()
    ),
}


def running_in(
    changes: Sequence[Changes],
    of_batch: Changes,
    value_at: Callable[[Path], Any],
    sizes: Sequence[int],
    rules: Rules,
) -> Changes:
    """The running means and variances among what the batch has changed.

    Args:
        changes: What each microbatch has changed.
        of_batch: What the batch has.
        value_at: Gives what was somewhere before.
        sizes: How many samples the microbatches have.
        rules: What is known of values at the same place.
    """
    found: Changes = {}
    for path, (how, value) in of_batch.items() if len(changes) > 1 else ():
        kind = _KINDS.get(str(rules.of(named(path), value, ask=False)))
        numbers = [] if kind is None else _numbers_at(path, changes, value_at)
        if kind is None or not numbers:
            continue
        beside = [other for other in of_batch if other[:-1] == path[:-1] and other != path]
        counts = next(filter(None, (_counts_at(other, changes, of_batch, value_at, sizes) for other in beside)), None)
        others = (_numbers_at(other, changes, value_at) for other in beside)
        means = next((each for each in others if each and each[0].shape == numbers[0].shape), None)
        if counts is None:
            continue
        if kind is _KINDS["running mean"]:
            together = _together(kind, numbers, numbers, numbers[0], counts, sizes)
        elif means is not None:
            mean = _together(_KINDS["running mean"], means, means, means[0], counts, sizes)
            together = _together(kind, numbers, means, mean, counts, sizes)
        else:
            continue
        found[path] = (how, _like(value, together))
    return found


def _together(
    kind: _Kind,
    numbers: Sequence[torch.Tensor],
    means: Sequence[torch.Tensor],
    mean: torch.Tensor,
    counts: Sequence[float],
    sizes: Sequence[int],
) -> torch.Tensor:
    """A number of the batch.

    Args:
        kind: What it is.
        numbers: What it was before, and in each microbatch.
        means: The mean likewise.
        mean: That of the batch.
        counts: Of how many samples they were.
        sizes: How many of these each microbatch has brought.
    """
    (first, *of_parts), (first_mean, *mean_of_parts), (before, *after) = numbers, means, counts
    number_of_all, brought = sum(sizes), torch.zeros_like(first)
    for number, mean_of_part, count, size in zip(of_parts, mean_of_parts, after, sizes, strict=True):
        of_this = kind.total(number, mean_of_part, count) - kind.total(first, first_mean, count - size)
        if kind.is_larger:
            square = (mean_of_part * count - first_mean * (count - size)) ** 2 / size
            apart = (of_this - square) * (size - 1) / size if size > 1 else 0.0  # of one sample torch's is NaN
            of_this = square + apart
        brought = brought + of_this
    if kind.is_larger:
        square = (mean * (before + number_of_all) - first_mean * before) ** 2 / number_of_all
        brought = square + (brought - square) * number_of_all / (number_of_all - 1)
    together: torch.Tensor = kind.back(kind.total(first, first_mean, before) + brought, mean, before + number_of_all)
    return together


def _counts_at(
    path: Path,
    changes: Sequence[Changes],
    of_batch: Changes,
    value_at: Callable[[Path], Any],
    sizes: Sequence[int],
) -> list[float]:
    """A count of samples, before and in each microbatch; nothing if it is none.

    That of an object that counts samples goes on from microbatch to microbatch, see `meters`.
    """
    before, after = value_at(path), of_batch[path][1]
    if not all(_is_number(each) and torch.as_tensor(each).numel() == 1 for each in (before, after)):
        return []
    start, goes_on = float(before), path not in changes[0]
    expected = list(accumulate(sizes)) if goes_on else list(sizes)
    grown = expected if goes_on else [float(each[path][1]) - start for each in changes if path in each]
    pairs = zip([*grown, float(after) - start], [*expected, sum(sizes)], strict=False)
    if len(grown) < len(sizes) or any(abs(one - number) > _ROUNDED * number for one, number in pairs):
        return []
    return [start, *(start + number for number in grown)]


def _numbers_at(path: Path, changes: Sequence[Changes], value_at: Callable[[Path], Any]) -> list[torch.Tensor]:
    """Numbers that keep their shape, before and in each microbatch, in 64 bits; nothing if there are none."""
    values = [value_at(path), *(each[path][1] for each in changes if path in each)]
    if len(values) <= len(changes) or not all(map(_is_number, values)):
        return []
    numbers = [torch.as_tensor(value).detach().double() for value in values]
    return numbers if len({number.shape for number in numbers}) == 1 else []


def _is_number(value: Any) -> bool:
    is_array = isinstance(value, np.ndarray) and value.dtype.kind in "iuf"
    is_tensor = isinstance(value, torch.Tensor) and not (value.is_complex() or value.is_meta)
    return is_array or is_tensor or type(value) in (int, float)


def _like(value: Any, number: torch.Tensor) -> Any:
    """A number in the form of another one."""
    if isinstance(value, torch.Tensor):
        return number.to(value.dtype)
    return number.numpy().astype(value.dtype) if isinstance(value, np.ndarray) else type(value)(number)
