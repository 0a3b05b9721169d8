"""Stragglers: by which factor each replica is slower than it should be, moment by moment.

============  =========================================================================================
none          nobody is slower
thermal       some replicas stand in warm places; how much their GPUs throttle drifts over hours
links         now and then a link of a replica fails over to a slower one, for a few hours
power_caps    in the hours of the day when power is dear, some racks are capped
day           all three at once; a replica is as slow as the worst of its troubles
1.2           one replica takes 1.2 times as long, always (T'/T)
============  =========================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.ranges import is_number
from lightning_pfo.core.wording import did_you_mean, shortened
from lightning_pfo.planner.network.arrays import Floats

_LARGEST = 100.0
_DAY_H = 24.0

_WARM_SHARE, _THROTTLED, _DRIFT_H = 0.03, 0.12, 3.0
"""Share of replicas in warm places, by how much they are slower at the most, and how long that lasts."""

_FAILURES_PER_DAY, _SLOWER_LINK, _REPAIR_H = 0.004, (1.05, 1.5), 2.0
"""Failing links of a replica per day, how much slower it is then, and how long it takes to repair on average."""

_CAPPED_SHARE, _CAPPED, _CAPPED_H = 0.1, 1.1, (17.0, 21.0)
"""Share of replicas in racks that are capped, how much slower that makes them, and from when to when."""


def straggler_factors(
    stragglers: str | float | Sequence[Sequence[float]] | Floats, num_pipelines: int, num_moments: int, seed: int = 0
) -> Floats:
    """The factors, shape (moments, pipelines), each at least 1.

    Args:
        stragglers: A name of the table above, a factor T'/T of one replica, or the factors themselves, by moment.
        num_pipelines: Number of replicas.
        num_moments: Moments of a day at equal distances; one is enough where nothing changes.
        seed: Of the random draws.

    Raises:
        ConfigurationError: If the name is unknown or a factor is below 1.
    """
    if isinstance(stragglers, str):
        if stragglers not in STRAGGLERS:
            raise ConfigurationError(
                f"stragglers are {', '.join(STRAGGLERS)}, a factor such as 1.2, or a table of factors; got "
                f"{shortened(stragglers)}.{did_you_mean(stragglers, STRAGGLERS)}"
            )
        return STRAGGLERS[stragglers](num_pipelines, num_moments, np.random.default_rng(seed))
    if is_number(stragglers):
        factors = np.ones((1, num_pipelines))
        factors[0, 0] = float(stragglers)  # type: ignore[arg-type]
    else:
        factors = _table(stragglers)
    if factors.ndim != 2 or factors.shape[1] != num_pipelines or not factors.size:
        raise ConfigurationError(
            f"A table of stragglers has a row for each moment and a column for each of {num_pipelines} pipelines; got "
            f"the shape {factors.shape}."
        )
    if not ((factors >= 1) & (factors <= _LARGEST)).all():
        raise ConfigurationError(
            f"A straggler takes 1 to {_LARGEST:g} times as long as it should; got factors from {factors.min():g} to "
            f"{factors.max():g}."
        )
    return factors


def _table(values: Any) -> Floats:
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise ConfigurationError(f"A table of stragglers is made of numbers; got {shortened(values)}.") from None


def _none(num_pipelines: int, num_moments: int, draw: np.random.Generator) -> Floats:
    return np.ones((num_moments, num_pipelines))


def _thermal(num_pipelines: int, num_moments: int, draw: np.random.Generator) -> Floats:
    factors = _none(num_pipelines, num_moments, draw)
    warm = np.flatnonzero(draw.random(num_pipelines) < _WARM_SHARE)
    # A random walk that forgets in some hours, brought to 0 .. 1.
    keeps = float(np.exp(-_DAY_H / num_moments / _DRIFT_H))
    level = draw.normal(size=len(warm))
    for moment in range(num_moments):
        factors[moment, warm] += _THROTTLED / (1 + np.exp(-2 * level))
        level = keeps * level + np.sqrt(1 - keeps**2) * draw.normal(size=len(warm))
    return factors


def _links(num_pipelines: int, num_moments: int, draw: np.random.Generator) -> Floats:
    factors = _none(num_pipelines, num_moments, draw)
    hours = _hours(num_moments)
    for pipeline in np.repeat(np.arange(num_pipelines), draw.poisson(_FAILURES_PER_DAY, num_pipelines)).tolist():
        begin, length, factor = draw.uniform(0, _DAY_H), draw.exponential(_REPAIR_H), draw.uniform(*_SLOWER_LINK)
        failing = (hours >= begin) & (hours < begin + length)
        factors[failing, pipeline] = np.maximum(factors[failing, pipeline], factor)
    return factors


def _power_caps(num_pipelines: int, num_moments: int, draw: np.random.Generator) -> Floats:
    factors = _none(num_pipelines, num_moments, draw)
    hours, capped = _hours(num_moments), draw.random(num_pipelines) < _CAPPED_SHARE
    factors[np.ix_((hours >= _CAPPED_H[0]) & (hours < _CAPPED_H[1]), capped)] = _CAPPED
    return factors


def _day(num_pipelines: int, num_moments: int, draw: np.random.Generator) -> Floats:
    each = [make(num_pipelines, num_moments, draw) for make in (_thermal, _links, _power_caps)]
    return np.asarray(np.max(each, axis=0))


def _hours(num_moments: int) -> Floats:
    return np.linspace(0.0, _DAY_H, num_moments, endpoint=False)


STRAGGLERS: dict[str, Callable[[int, int, np.random.Generator], Floats]] = {
    "none": _none,
    "thermal": _thermal,
    "links": _links,
    "power_caps": _power_caps,
    "day": _day,
}
"""How stragglers come about, by name."""
